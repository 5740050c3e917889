"""The sections of a run file refuse values that cannot be trained with, by name."""

import pytest

from glassformer.config import ConfigError
from glassformer.training import sections


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: sections.Data(validation=0.0), "data.validation=0.0"),
        (lambda: sections.Data(vocab_size=0), "vocab_size=0"),
        (lambda: sections.Optim(beta1=1.0), "optim.beta1=1.0"),
        (lambda: sections.Schedule(warmup=-1), "schedule.warmup=-1"),
        (lambda: sections.Loss(mask_rate=1.0), "loss.mask_rate=1.0"),
        (lambda: sections.Loop(sample_every=-1), "loop.sample_every=-1 must be 0 (never) or more"),
        (lambda: sections.Loop(batch=12, accumulate=5), "not a multiple of loop.accumulate=5"),
        (lambda: sections.Machine(parallel="tp"), "parallel='tp'"),
        (lambda: sections.Probe(every=-1), "probe.every=-1"),
    ],
)
def test_values_out_of_range_are_refused_by_name(make, words):
    with pytest.raises(ConfigError) as caught:
        make()
    assert words in str(caught.value)
