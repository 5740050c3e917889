"""A wrong edit to the engine is noticed by the theory: at least three claims fail for each of the classic ones."""

import sys

import pytest

from glassformer.theory.claims import check
from tests.bugs.mutants import MUTANTS

CLASSIC = {
    "mask_flipped": ("encoder-from-decoder", "decoder-only-rationale", "order-needs-position"),
    "scale_one_over_d": ("preln-block-shape", "worked-example-qkv", "sinusoid-relative-score"),
    "positions_shifted": ("gpt2-logits-match", "gpt-logits-shape", "sinusoid-shift-rotation"),
    "positions_shifted_when_cached": ("kv-cache-exact", "kv-cache-validity", "generation-bug-triage"),
    "values_transposed": ("worked-example-qkv", "mlp-vs-transformer", "multihead-separation"),
}


@pytest.fixture(autouse=True)
def nothing_remembered():
    """What a claim keeps of a sound engine must not answer for a spoilt one, nor the other way round."""
    forget()
    yield
    forget()


def forget():
    for name, module in list(sys.modules.items()):
        if name.startswith("glassformer."):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def holds(id):
    """A claim that cannot even be run on a spoilt engine does not hold on it."""
    try:
        return check(id, slow=False).passed
    except (IndexError, RuntimeError):
        return False


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "mutant", [pytest.param(m, marks=pytest.mark.slow) if m == "positions_shifted_when_cached" else m for m in CLASSIC]
)
def test_each_wrong_edit_makes_three_claims_fail(mutant):
    with MUTANTS[mutant]():
        failed = [id for id in CLASSIC[mutant] if not holds(id)]
    assert len(failed) >= 3, failed
