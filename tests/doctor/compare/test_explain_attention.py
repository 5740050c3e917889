"""What differs inside attention: rotation measured from its effect, scales named, biases distinguished from factors."""

import dataclasses

import pytest
import torch

from glassformer import config as c
from glassformer.doctor.compare.explain_attention import explain_scores, explain_turned, explain_values
from glassformer.doctor.compare.run import compare
from tests.bugs.zoo import by_id
from tests.doctor.compare.pairs import ours, theirs
from tests.doctor.compare.scenes import scene

LLAMA = ours("llama").config


def test_interpolated_positions_are_a_factor_on_the_frequencies():
    scaled = dataclasses.replace(LLAMA.position, scaling=c.LinearScaling(factor=2.0))
    found = explain_turned(scene(theirs("llama"), ours("llama", position=scaled), "blocks.0.attention.q"))
    assert found.convention == "rope_base"
    assert "B's frequencies are A's times 0.5" in found.text


def test_an_offset_of_all_positions_is_measured_though_relative_positions_do_not_notice():
    made = scene(ours("llama"), ours("llama"), "blocks.0.attention.q")
    attention = made.b.block.attention
    turned = torch.cat([attention.q[:, :, 1:], attention.q[:, :, :1]], 2)
    flat = torch.cat([attention.flat["q"][:, :, 1:], attention.flat["q"][:, :, :1]], 2)
    made.b.block.attention = dataclasses.replace(
        attention, q=turned[:, :, :-1], flat={**attention.flat, "q": flat[:, :, :-1]}
    )
    made.b.value = turned[:, :, :-1]
    one = made.a.block.attention
    made.a.value = one.q[:, :, :-1]
    made.a.block.attention = dataclasses.replace(
        one, q=one.q[:, :, :-1], flat={**one.flat, "q": one.flat["q"][:, :, :-1]}
    )
    found = explain_turned(made)
    assert found.convention == "position_offset"
    assert "first position 0; B" in found.text
    assert found.text.endswith("first position 1")


def test_value_heads_in_another_order():
    made = scene(ours("llama"), ours("llama"), "blocks.0.attention.v")
    made.b.value = made.b.value[:, [0, 3, 1, 4, 2, 5]]
    found = explain_values(made)
    assert found.convention == "gqa_order"
    assert explain_values(scene(ours("llama"), ours("llama"), "blocks.0.attention.v")) is None


def test_a_bias_on_the_scores_is_distinguished_from_a_scale():
    made = scene(ours("gpt2", position=c.Alibi()), ours("gpt2", position=c.NoPosition()), "blocks.0.attention.scores")
    assert explain_scores(made).convention == "position_bias"
    alibi = [ours("gpt2", position=c.Alibi(), attention=c.Attention(n_heads=3, scale=s)) for s in (None, 0.1)]
    found = explain_scores(scene(*alibi, "blocks.0.attention.scores"))
    assert found.convention == "attn_scale"
    assert "0.353553 = 1/√K, B by 0.1, and both add a bias" in found.text
    assert found.residual < 1e-9


@pytest.mark.parametrize(
    ("id", "words"),
    [
        ("softmax_twice", "B applies masked_fill, softmax again to the attention weights"),
        ("softmax_twice_unmasked", "B applies softmax again to the attention weights"),
        ("weights_squared_normed", "B applies pow, sum, div to the attention weights"),
    ],
)
def test_an_operation_after_softmax_is_named(id, words):
    bug = by_id(id)
    found = compare(bug.healthy(), bug.build())
    assert (found.first, found.convention) == ("blocks.0.attention.weights", "attention_weights")
    assert words in found.explanation.text
    assert "A uses the attention weights unchanged" in found.explanation.text
