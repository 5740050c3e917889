"""What tying saves and what it costs."""

import math

import pytest
import torch

from glassformer.theory.claims.claim import Lab
from glassformer.theory.claims.counting import tying


def test_gradient_of_a_separate_head_is_not_the_tied_one():
    parts = {p.id: p for p in tying.weight_tying_saving(Lab(broken=True))}
    assert not parts["tied gradient = sum of the two"].passed
    assert not parts["the same logits, bit for bit"].passed


def test_zero_layer_logits_are_products_of_the_table():
    model, logits = tying.zero_layer("tied")
    table = model.embed.tokens.weight
    torch.testing.assert_close(logits(), table @ table.T)


@pytest.mark.parametrize("seed", range(3))
def test_no_table_beats_guessing_on_the_cycle(seed):
    generator = torch.Generator().manual_seed(seed)
    targets = torch.tensor([after for _, after in tying.CYCLE])
    for scale in (0.1, 1.0, 5.0):
        table = scale * torch.randn(3, 8, generator=generator, dtype=torch.float64)
        assert torch.nn.functional.cross_entropy(table @ table.T, targets) >= math.log(3)


def test_training_is_left_out_aloud_when_there_is_no_time():
    [left_out] = [p for p in tying.weight_tying_expressivity(Lab()) if p.verdict == "skip"]
    assert "--slow" in left_out.why


@pytest.mark.slow
def test_training_on_the_cycle_ends_at_the_proved_loss():
    parts = {p.id: p for p in tying.weight_tying_expressivity(Lab(slow=True))}
    assert all(p.passed for p in parts.values())
    assert parts["tied, trained on the cycle"].measured == pytest.approx(math.log(3), abs=1e-5)


def test_a_few_steps_untied_already_pass_what_tied_never_does():
    assert tying.trained("untied", 0, 150)[0] < math.log(3) - 0.5
    assert tying.trained("tied", 0, 150)[0] >= math.log(3) - 1e-9
