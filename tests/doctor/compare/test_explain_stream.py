"""What differs between two streams made from the same: embeddings, norms, sums."""

import torch

from glassformer import config as c
from glassformer.doctor.compare.explain_stream import explain_embed, explain_norm, explain_sum, explain_tokens
from tests.doctor.compare.pairs import ours, theirs
from tests.doctor.compare.scenes import scene


def test_sinusoids_laid_out_otherwise():
    pair = [ours("gpt2", position=c.Sinusoidal(layout=layout)) for layout in ("interleaved", "halves")]
    assert explain_embed(scene(*pair, "embed")).convention == "position_layout"


def test_eps_of_an_embedding_norm_is_found_behind_the_sum():
    found = explain_embed(scene(theirs("bert"), ours("bert", norm=c.LayerNorm(eps=1e-5)), "embed"))
    assert found.convention == "norm_eps"
    assert found.text == "A is LayerNorm(eps=1e-12), B is LayerNorm(eps=1e-05)"


def test_other_tokens_and_scaled_tokens():
    made = scene(ours("gpt2"), ours("gpt2"), "tokens")
    made.b.value, made.difference = made.b.value * 24**0.5, 1.0
    assert explain_tokens(made).text == "B's token vectors are A's times 4.89898 = √D"
    made.b.value = torch.randn_like(made.b.value)
    assert explain_tokens(made).convention == "weights"


def test_norm_weights_that_differ_are_not_taken_for_a_formula():
    model = ours("gpt2")
    with torch.no_grad():
        model.decoder.blocks[0].norm_attention.weight.add_(1)
    assert explain_norm(scene(ours("gpt2"), model, "blocks.0.attention.normed")).convention == "weights"


def test_what_is_added_to_the_stream():
    made = scene(ours("gpt2"), ours("gpt2"), "blocks.0.attention.sum")
    block = made.a.block
    out, read = block.attention.merged.out, block.attention.projections["q"].read
    made.difference = 1.0
    cases = {
        "normed input": read + out,
        "does not add the stream": out,
        "the branch by 0.5": block.entering + 0.5 * out,
    }
    for words, value in cases.items():
        made.b.value = value
        assert words in explain_sum(made).text
    made.b.value = block.entering + torch.nn.functional.layer_norm(out, (24,))
    assert explain_sum(made).convention == "norm_placement"
