"""Caches: rollback, beams, capacity, what they hold and what they refuse."""

import itertools

import pytest
import torch

from glassformer import config as c
from glassformer.model import build
from glassformer.model.cache import build_cache
from glassformer.reference import forward
from tests import variants
from tests.variants import lively, ragged_mask, tokens

KINDS = ["growing", "static", "fixed", "windowed"]


def new_cache(model, kind, capacity=20, slack=0):
    return model.new_cache("static" if kind == "fixed" else kind, capacity, slack, fixed=kind == "fixed")


@pytest.mark.sample(24)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", variants.POSITIONS)
@torch.no_grad()
def test_crop_then_go_on_equals_never_having_gone_there(name, padded, kind):
    """Speculation: decode four tokens that turn out wrong, crop them off, decode the right ones."""
    model, _ = lively(variants.decoder(position=variants.POSITIONS[name], window=5))
    ids, wrong = tokens(3, 15), tokens(3, 4, seed=9)
    mask = ragged_mask([15, 12, 10], 15, "left") if padded else None
    cache = new_cache(model, kind, slack=4)
    model(ids[:, :8], mask=None if mask is None else mask[:, :8], cache=cache)
    for i in range(4):
        model(wrong[:, i : i + 1], cache=cache)
    cache.crop(8)
    assert len(cache) == 8
    rest = torch.cat([model(ids[:, i : i + 1], cache=cache) for i in range(8, 15)], dim=1)
    assert (rest - model(ids, mask=mask)[:, 8:]).abs().max() <= 1e-12


@pytest.mark.sample(12)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", variants.POSITIONS)
@torch.no_grad()
def test_blocks_cut_back_by_any_number_of_tokens_leave_the_oracles_logits(name, kind):
    """Four places a pass, of which 4, 3, 2, 1, 4, ... stay: every pass starts with a crop, past the window's width."""
    model, params = lively(variants.decoder(position=variants.POSITIONS[name], window=5))
    ids, wrong = tokens(2, 25), tokens(2, 25, seed=9)
    cache, length, found = new_cache(model, kind, capacity=29, slack=3), 0, []
    for n in itertools.cycle((4, 3, 2, 1)):
        block = torch.cat([ids[:, length : length + n], wrong[:, length + n : length + 4]], dim=1)
        found.append(model(block, cache=cache)[:, :n])
        length = min(length + n, 25)
        cache.crop(length)
        if length == 25:
            break
    oracle = forward(model.config, params, ids.numpy())
    assert abs(torch.cat(found, dim=1).numpy() - oracle).max() <= 1e-11


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_reorder_follows_the_rows(kind):
    model, _ = lively(variants.decoder(position=c.Alibi(), window=5))
    ids, mask = tokens(3, 9), ragged_mask([9, 4, 6], 9, "left")
    rows = torch.tensor([2, 0, 2, 1])
    cache = new_cache(model, kind)
    model(ids, mask=mask, cache=cache)
    cache.reorder(rows)
    nxt = tokens(4, 1, seed=5)
    whole = torch.cat([ids[rows], nxt], dim=1)
    whole_mask = torch.cat([mask[rows], torch.ones(4, 1, dtype=torch.bool)], dim=1)
    assert (model(nxt, cache=cache)[:, 0] - model(whole, mask=whole_mask)[:, -1]).abs().max() <= 1e-12


@torch.no_grad()
def test_explicit_positions_are_remembered_and_continued():
    model, _ = lively(variants.decoder(position=c.T5Bias(buckets=8, max_distance=20)))
    ids, positions = tokens(2, 6), torch.tensor([[0, 2, 4, 6, 8, 9]])
    cache = model.new_cache()
    model(ids[:, :5], positions=positions[:, :5], cache=cache)
    assert (model(ids[:, 5:], cache=cache)[:, 0] - model(ids, positions=positions)[:, -1]).abs().max() <= 1e-12


@torch.no_grad()
def test_a_windowed_cache_holds_no_more_than_its_window():
    model, _ = lively(variants.decoder(window=4))
    windowed, growing = model.new_cache("windowed"), model.new_cache("growing")
    for i in range(20):
        step = tokens(1, 1, seed=i)
        assert (model(step, cache=windowed) - model(step, cache=growing)).abs().max() <= 1e-12
    per_token = 2 * 2 * (2 * variants.K) * 8  # layers * (k, v) * G*K * bytes of a float64
    assert windowed.n_bytes() == 3 * per_token
    assert growing.n_bytes() == 20 * per_token


@torch.no_grad()
def test_layers_without_a_window_keep_everything_in_a_windowed_cache():
    model, _ = lively(variants.decoder(attention=c.Attention(n_heads=7, window=3, window_layers=(1,))))
    cache = model.new_cache("windowed")
    ids = tokens(2, 12)
    steps = torch.cat([model(ids[:, i : i + 1], cache=cache) for i in range(12)], dim=1)
    assert (steps - model(ids)).abs().max() <= 1e-12
    assert cache.layers[0].k.shape[2] == 12
    assert cache.layers[1].k.shape[2] == 2


@torch.no_grad()
def test_static_bytes_are_those_of_the_capacity():
    model, _ = lively(variants.decoder())
    cache = model.new_cache("static", capacity=20)
    model(tokens(3, 5), cache=cache)
    assert cache.n_bytes() == 3 * 20 * 2 * 2 * (2 * variants.K) * 8


@torch.no_grad()
def test_fixed_shapes_do_not_change_from_step_to_step():
    model, _ = lively(variants.decoder())
    cache = new_cache(model, "fixed", capacity=9)
    model(tokens(2, 4), cache=cache)
    before = [layer.k.data_ptr() for layer in cache.layers]
    for i in range(5):
        model(tokens(2, 1, seed=i), cache=cache)
    assert [layer.k.data_ptr() for layer in cache.layers] == before
    assert int(cache.counter) + cache.new == len(cache) == 9


@torch.no_grad()
def test_a_fixed_cache_prepares_rotations_for_its_whole_capacity():
    """Replayed from a graph, the step reads the table at positions Python never saw."""
    model, _ = lively(variants.decoder(position=c.Rotary(), max_len=None))
    model(tokens(1, 3), cache=model.new_cache("static", capacity=3000, fixed=True))
    ((cos, _),) = model.decoder.position.tables.values()
    assert len(cos) >= 3000


def test_growing_cache_carries_gradients():
    """The loss of a chunk reaches the tokens of the chunk before it, as in one pass."""
    model, _ = lively(variants.decoder())
    ids = tokens(1, 6)
    model(ids)[:, 4:].sum().backward()
    whole = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    cache = model.new_cache()
    model(ids[:, :4], cache=cache)
    model(ids[:, 4:], cache=cache).sum().backward()
    for name, p in model.named_parameters():
        assert torch.allclose(p.grad, whole[name], atol=1e-12), name


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: m.new_cache("static"), "pass capacity"),
        (lambda m: m.new_cache("windowed"), "no layer of this model has one"),
        (lambda m: build_cache.__wrapped__([None], "ring", torch.device("cpu")), "'ring' is not supported"),
        (lambda m: m.new_cache().crop(1), "cannot crop to 1 tokens: the cache holds 0"),
        (lambda m: m(tokens(1, 2), cache=m.new_cache("static", capacity=3)), "carries no gradients"),
    ],
)
def test_misuse_is_refused_in_words(call, words):
    with pytest.raises(ValueError, match=words):
        call(build(variants.decoder()))


@torch.no_grad()
def test_overflow_and_deep_rollback_are_refused():
    model = build(variants.decoder(window=4))
    static = model.new_cache("static", capacity=3)
    model(tokens(1, 2), cache=static)
    with pytest.raises(ValueError, match="2 tokens do not fit a cache of capacity 3 that holds 2"):
        model(tokens(1, 2), cache=static)
    windowed = model.new_cache("windowed", slack=1)
    for i in range(9):
        model(tokens(1, 1, seed=i), cache=windowed)
    with pytest.raises(ValueError, match="slack=2 or more"):
        windowed.crop(7)


@torch.no_grad()
def test_an_enlarged_static_cache_keeps_what_it_holds():
    model, _ = lively(variants.decoder(window=5))
    ids = tokens(2, 15)
    cache = model.new_cache("static", capacity=7)
    model(ids[:, :7], cache=cache)
    with pytest.raises(ValueError, match="capacity 7"):
        model(ids[:, 7:], cache=cache)
    cache.enlarge(15)
    torch.testing.assert_close(model(ids[:, 7:], cache=cache), model(ids)[:, 7:])
