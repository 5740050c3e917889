"""What differs between two projections of the same input."""

import torch

from glassformer import config as c
from glassformer.doctor.compare.explain_linear import explain_linear, explain_logits, part_of
from tests.doctor.compare.pairs import ours, theirs
from tests.doctor.compare.scenes import parts_of, scene


def changed(change):
    model = ours("gpt2")
    with torch.no_grad():
        change(model)
    return scene(theirs("gpt2"), model, "blocks.0.feedforward.out")


def down(model):
    return model.decoder.blocks[0].feedforward.down


def test_columns_factors_and_other_numbers_are_distinguished():
    def rolled(m):
        down(m).weight.copy_(down(m).weight.roll(1, 0).clone())
        down(m).bias.copy_(down(m).bias.roll(1, 0).clone())

    def doubled(m):
        down(m).weight.mul_(2)
        down(m).bias.mul_(2)

    assert explain_linear(changed(rolled)).convention == "column_order"
    assert explain_linear(changed(doubled)).text.startswith("B's output is A's times 2 ")
    other = explain_linear(changed(lambda m: down(m).weight[0].add_(1)))
    assert other.convention == "weights"
    assert "decoder.blocks.0.feedforward.down.weight" in other.text


def test_the_part_of_a_fused_projection_is_found_by_its_columns():
    block = parts_of(theirs("gpt2").double()).blocks[0]
    whole, flat = block.attention.projections["k"], block.attention.flat["k"]
    assert whole.weight.shape == (24, 72)
    part = part_of(whole, flat)
    assert torch.equal(part.weight, whole.weight[:, 24:48])
    assert part_of(whole, torch.randn_like(flat)) is None


def test_logits_by_a_factor_and_by_a_cap():
    made = scene(ours("gpt2"), ours("gpt2", head=c.Head(scale=0.25)), "logits")
    assert explain_logits(made).convention == "factor"
    made = scene(ours("gpt2"), ours("gpt2"), "logits")
    made.b.value, made.difference = 20 * torch.tanh(made.b.value / 20), 1.0
    assert explain_logits(made).text.startswith("B caps logits at 20:")
