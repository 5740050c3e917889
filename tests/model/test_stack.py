"""What a stack does beside its blocks: positions from masks, windows per layer, the learned table's end."""

import pytest
import torch

from glassformer import config as c
from glassformer.model import build
from tests import variants
from tests.variants import lively, ragged_mask, tokens


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


def test_layers_that_share_a_block_have_caches_and_sites_of_their_own():
    """Four layers over two blocks: the parameters exist once, decoding with a cache gives the same logits."""
    config = variants.decoder(n_layers=4, shared_blocks=(0, 0, 1, 0))
    model, _ = variants.lively(config)
    assert len(model.decoder.blocks) == 2
    assert [block is model.decoder.blocks[i] for block, i in zip(model.blocks, (0, 0, 1, 0), strict=True)] == [True] * 4
    ids, cache = variants.tokens(2, 9), model.new_cache()
    pieces = [model(ids[:, :5], cache=cache), model(ids[:, 5:6], cache=cache), model(ids[:, 6:], cache=cache)]
    assert len(cache.layers) == 4
    assert (torch.cat(pieces, dim=1) - model(ids)).abs().max() <= 1e-12
    alone = variants.lively(c.replace(config, shared_blocks=None))[0]
    alone.load_state_dict(
        {
            name: model.state_dict()[name.replace(f"blocks.{i}.", f"blocks.{b}.")]
            for i, b in enumerate(config.shared_blocks)
            for name in alone.state_dict()
            if f"blocks.{i}." in name or (i == 0 and "blocks." not in name)
        }
    )
    assert (alone(ids) - model(ids)).abs().max() <= 1e-12
