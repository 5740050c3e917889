"""What an optimizer and a training loop add to the memory of a step: states, averages, copies of weights, temporaries.

`StepOptions()` is the plain step that `memory` describes. A run of `glass train` differs from it, and
`training.forecast` fills in how: matmuls under autocast, averaged weights, accumulated gradients, a head and loss
computed in chunks, evaluation between steps.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from glassformer.config.optimizer import OPTIMIZERS, OptimizerKind, rule_for

Optimizer = Literal[OptimizerKind, "sgd", "none"]
"""The optimizers of a run file, and two for comparison: plain SGD, and no optimizer step at all."""

BYTES: dict[str, float] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "int4": 0.5}
"""Bytes of one number. int8 and int4 are formats of weights only: activations and cache are then taken as bfloat16."""


@dataclass(frozen=True)
class StepOptions:
    """How a training loop differs from the plain step."""

    matmuls: str | None = None
    """Dtype of matmuls and their inputs under autocast, with weights and gradients in the dtype of the model."""
    residual: str | None = None
    """Dtype of the residual stream under autocast. Default: the dtype of the weights."""
    average: bool = False
    """True if an exponential moving average of the weights (EMA) is kept."""
    accumulate: int = 1
    """Parts in which the batch of a step is computed; gradients are kept from one part to the next."""
    fused: bool = False
    """True for a fused AdamW, which needs no temporaries."""
    head_bytes: int | None = None
    """Bytes that the logits of one chunk may take in float32 where head and loss run in chunks. Default: one chunk,
    through `F.cross_entropy`."""
    chunk_copies: float = 0.0
    """Bytes for each logit of a chunk, everything alive at once."""
    smoothing: bool = False
    """True for label smoothing, which computes log-softmax a second time."""
    evaluation: int | None = None
    """Sequences of a batch of evaluation. Default: no evaluation."""


def check_optimizer(optimizer: str) -> Optimizer:
    """Return the name if it is known; raise ValueError otherwise."""
    for known in get_args(Optimizer):
        if optimizer == known:
            return known
    raise ValueError(f"optimizer={optimizer!r} is not known. Use one of {', '.join(get_args(Optimizer))}.")


def states(name: str, optimizer: Optimizer) -> int:
    """Numbers that an optimizer keeps for each number of a parameter; step counters are not counted."""
    if optimizer == "sgd" or optimizer == "none":
        return 0
    facts = OPTIMIZERS[optimizer]
    return facts.matrix_states if rule_for(name).matrix else facts.states


def state_bytes(sizes: Mapping[str, int], optimizer: Optimizer) -> int:
    """Bytes of all states. `sizes`: bytes of each parameter by name."""
    return sum(states(name, optimizer) * size for name, size in sizes.items())


def temporaries(shapes: Mapping[str, tuple[int, ...]], width: int, optimizer: Optimizer, fused: bool) -> int:
    """Bytes that the optimizer's step allocates for a moment; `width` is the size of a weight."""
    if optimizer == "sgd" or optimizer == "none":
        return 0
    if optimizer == "muon":
        return _muon_temporaries(shapes, width)
    # one parameter at a time; of AdamW, sqrt of the second moment and the quotient
    return 0 if fused else OPTIMIZERS[optimizer].temporaries * width * max(map(math.prod, shapes.values()))


def _muon_temporaries(shapes: Mapping[str, tuple[int, ...]], width: int) -> int:
    """Peak of `train.muon.Muon.step` without its GPU kernels.

    First the matrices of one shape are stacked: gradients, momenta and their bfloat16 mixture, next to the mixtures
    of the shapes before. Then shapes that are transposes of each other are orthogonalized together in bfloat16, and the
    update of one shape is widened and scaled.
    """
    stacks: dict[tuple[int, ...], int] = {}
    for name, shape in shapes.items():
        if rule_for(name).matrix:
            stacks[shape] = stacks.get(shape, 0) + math.prod(shape)
    mixed, peak = 0, 0
    for numbers in stacks.values():
        peak = max(peak, mixed + (2 * width + 2) * numbers)
        mixed += 2 * numbers
    sides: dict[tuple[int, ...], int] = {}
    for shape, numbers in stacks.items():
        side = tuple(sorted(shape))
        sides[side] = sides.get(side, 0) + numbers
    made = 0
    for (rows, columns), numbers in sides.items():
        gram = 2 * numbers // columns * rows  # x x^T of each matrix, and its polynomial
        peak = max(peak, mixed + made + 2 * 2 * numbers + 2 * gram)
        made += 2 * numbers
    return max(peak, mixed + made + max((2 * width * numbers for numbers in stacks.values()), default=0))
