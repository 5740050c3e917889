"""Learning-rate schedules: pure functions of the step."""

import math
from typing import assert_never

from glassformer.training.run import Schedule


def factor(schedule: Schedule, step: int, steps: int) -> float:
    """Return the factor on the peak learning rate at `step`, 0 <= step < steps.

    Warm-up is linear and ends at 1 on step `warmup`: (step + 1) / (warmup + 1). Then
    constant: 1;
    cosine:   floor + (1 - floor) (1 + cos(pi p)) / 2, p the fraction of the steps after the warm-up that are done;
    wsd:      1, then over the last fraction `decay` of all steps a linear decay to the floor.
    """
    if step < schedule.warmup:
        return (step + 1) / (schedule.warmup + 1)
    match schedule.kind:
        case "constant":
            return 1.0
        case "cosine":
            done = (step - schedule.warmup) / max(1, steps - 1 - schedule.warmup)
            return schedule.floor + (1 - schedule.floor) * (1 + math.cos(math.pi * min(1.0, done))) / 2
        case "wsd":
            start = max(schedule.warmup, round(steps * (1 - schedule.decay)))
            done = max(0.0, (step - start) / max(1, steps - 1 - start))
            return 1 - (1 - schedule.floor) * min(1.0, done)
        case _:
            assert_never(schedule.kind)
