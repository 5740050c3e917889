"""Residual wiring of a block, and what a stack adds: positions from masks, windows per layer, the end of a table."""

import pytest
import torch

from glassformer import config as c
from glassformer.model import build
from tests import variants
from tests.model.test_attention import Wanting
from tests.variants import lively, ragged_mask, tokens


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


@pytest.mark.parametrize("name", variants.POSITIONS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_row_equals_the_row_alone(name, side):
    model, _ = lively(variants.decoder(position=variants.POSITIONS[name]))
    ids, lengths = tokens(3, 11), [11, 6, 1]
    padded = model(ids, mask=ragged_mask(lengths, 11, side))
    for i, n in enumerate(lengths):
        at = slice(11 - n, 11) if side == "left" else slice(0, n)
        assert (padded[i, at] - model(ids[i : i + 1, at])[0]).abs().max() <= 1e-12


def test_windows_apply_to_their_layers_alone():
    """One windowed layer after a full one: token 0 still reaches the last place, and not when both are windowed."""

    def reach(layers):
        model, _ = lively(variants.decoder(attention=c.Attention(n_heads=7, window=2, window_layers=layers)))
        ids = tokens(1, 9)
        changed = ids.clone()
        changed[0, 0] = (changed[0, 0] + 1) % variants.V
        return (model(ids) - model(changed))[0, -1].abs().max().item()

    assert reach((1,)) > 1e-6
    assert reach(None) == 0.0


def test_stack_reaches_layers_times_window_minus_one_tokens_back():
    model, _ = lively(variants.decoder(window=3))  # two layers: 2 * (3 - 1) = 4 tokens back
    ids = tokens(1, 9)
    for back, visible in [(4, True), (5, False)]:
        changed = ids.clone()
        changed[0, 8 - back] = (changed[0, 8 - back] + 1) % variants.V
        assert bool((model(ids) - model(changed))[0, -1].abs().max() > 0) is visible


def test_learned_table_ends_where_the_context_ends():
    model = build(variants.decoder())
    model(tokens(1, variants.MAX_LEN))
    with pytest.raises(ValueError, match="position 29 is outside a learned table of 29"):
        model(tokens(1, variants.MAX_LEN + 1))
    cache = model.new_cache()
    model(tokens(1, variants.MAX_LEN), cache=cache)
    with pytest.raises(ValueError, match="position 29"):
        model(tokens(1, 1), cache=cache)


@pytest.mark.parametrize("position", [c.Rotary(), c.Alibi(), c.Sinusoidal(), c.NoPosition()])
def test_schemes_without_a_table_run_past_the_context(position):
    model = build(variants.decoder(position=position))
    assert torch.isfinite(model(tokens(1, 2 * variants.MAX_LEN))).all()


def test_left_padding_leaves_the_learned_table_its_full_length():
    """Positions count real tokens: a row of max_len tokens with 5 padding places before it still fits."""
    model, _ = lively(variants.decoder())
    ids = tokens(1, variants.MAX_LEN + 5)
    mask = ragged_mask([variants.MAX_LEN], variants.MAX_LEN + 5, "left")
    assert (model(ids, mask=mask)[:, 5:] - model(ids[:, 5:])).abs().max() <= 1e-12
