"""Residual wiring: what a block adds is exactly what its branches put out."""

import pytest
import torch

from glassformer import config as c
from tests import variants
from tests.model.test_attention import Wanting
from tests.variants import lively, tokens


@pytest.mark.parametrize("cross", [False, True])
def test_pre_norm_stream_is_a_running_sum(cross):
    model, _ = lively(variants.seq2seq() if cross else variants.decoder())
    tap = Wanting()
    model(tokens(2, 5), tokens(2, 5), tap=tap) if cross else model(tokens(2, 5), tap=tap)
    place = "decoder.blocks" if cross else "blocks"
    branches = ["attention.out", *(["cross.out"] if cross else []), "feedforward.out"]
    for layer in range(2):
        added = sum(tap.seen[f"{place}.{layer}.{name}"] for name in branches)
        change = tap.seen[f"{place}.{layer}.resid_post"] - tap.seen[f"{place}.{layer}.resid_pre"]
        assert (change - added).abs().max() < 1e-13


def test_post_norm_output_is_normalised():
    model, _ = lively(variants.decoder(placement="post", norm=c.LayerNorm(eps=1e-12)))
    for block in model.blocks:
        torch.nn.init.ones_(block.norm_feedforward.weight)
        torch.nn.init.zeros_(block.norm_feedforward.bias)
    tap = Wanting()
    model(tokens(2, 5), tap=tap)
    out = tap.seen["blocks.1.resid_post"]
    assert out.mean(-1).abs().max() < 1e-12
    assert (out.var(-1, unbiased=False) - 1).abs().max() < 1e-9
    assert torch.equal(tap.seen["final"], out)  # no final norm on top


def test_parallel_branches_read_the_same_norm():
    model, _ = lively(variants.decoder(placement="parallel"))
    tap = Wanting()
    model(tokens(2, 5), tap=tap)
    seen = {k.removeprefix("blocks.0."): v for k, v in tap.seen.items()}
    normed = model.blocks[0].norm(seen["resid_pre"])
    assert torch.equal(seen["attention.normed"], normed)
    assert torch.equal(model.blocks[0].feedforward(normed, Wanting()), seen["feedforward.out"])


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_an_attention_only_block_has_one_branch(placement):
    model, _ = lively(variants.decoder(feedforward=c.NoFeedForward(), placement=placement))
    tap = Wanting()
    model(tokens(2, 5), tap=tap)
    assert not [site for site in tap.seen if "feedforward" in site]
    assert not [name for name, _ in model.named_parameters() if "feedforward" in name]
    for layer in range(2):
        stream = {name: tap.seen[f"blocks.{layer}.{name}"] for name in ("resid_pre", "resid_mid", "resid_post")}
        assert torch.equal(stream["resid_mid"], stream["resid_post"])
        total = stream["resid_pre"] + tap.seen[f"blocks.{layer}.attention.out"]
        expected = total if placement == "pre" else model.blocks[layer].norm_attention(total)
        assert torch.equal(stream["resid_post"], expected)


def test_dropout_acts_in_training_only():
    config = variants.decoder(dropout=0.5)
    model, _ = lively(config)
    ids = tokens(2, 9)
    assert torch.equal(model(ids), model(ids))
    model.train()
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))


def test_dropout_keeps_the_mean_of_the_pattern():
    """2,000 draws of a two-token pattern under dropout 0.25 average to the pattern, within 5 standard errors."""
    from glassformer.model.attention import explicit_attention

    q = torch.zeros(2000, 1, 1, 2)
    v = torch.tensor([[1.0], [3.0]]).expand(2000, 1, 2, 1)
    out = explicit_attention(q, torch.zeros(2000, 1, 2, 2), v, 1.0, dropout=0.25)
    error = float(out.std()) / 2000**0.5
    assert abs(float(out.mean()) - 2.0) < 5 * error
    assert float(out.std()) > 0.1
