"""Positions, masks and sites of a forward pass, and the inputs that it refuses, one sentence each."""

import re

import pytest
import torch

from glassformer import config as c
from glassformer.model import build
from glassformer.model.cache import Cache
from glassformer.model.context import NO_TAP, Tap, attention_masks, check_inputs, forward_context, scoped
from glassformer.model.positions import NoPosition
from tests import variants
from tests.model.test_attention import Wanting
from tests.variants import decoder, lively, tokens

CPU = torch.device("cpu")


def recorded(past: int, new: int, real=None, **settings) -> Cache:
    """A cache that holds `past` tokens and has just recorded `new` more."""
    cache = Cache(CPU, **settings)
    if past:
        cache.append(past)
    cache.append(new, real=real)
    return cache


def masks(cache, width=None, is_causal=True, **settings):
    return attention_masks(cache, [width], is_causal, **settings)[0]


def test_no_mask_is_built_where_none_is_needed():
    assert masks(recorded(0, 5)) == (None, True)
    assert masks(recorded(4, 1)) == (None, False)
    assert masks(recorded(0, 5), is_causal=False) == (None, False)
    assert masks(recorded(2, 1), width=3) == (None, False)
    assert masks(recorded(0, 1)) == (None, False)


def test_new_tokens_after_cached_ones_attend_to_all_before():
    mask, is_causal = masks(recorded(2, 2))
    assert not is_causal
    assert mask[0, 0].int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]


def test_layers_differ_in_their_window():
    wide, narrow = attention_masks(recorded(0, 3), [None, 2], True)
    assert wide == (None, True)
    assert narrow[0][0, 0].int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]


def test_empty_slots_of_a_fixed_buffer_are_masked():
    mask, _ = masks(recorded(1, 1, capacity=4, fixed=True))
    assert mask[0, 0].int().tolist() == [[1, 1, 0, 0]]


def test_a_padding_query_attends_to_itself_and_no_query_to_padding():
    mask, _ = masks(recorded(0, 4, real=torch.tensor([[False, False, True, True]])))
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]


def test_a_bias_is_masked_once_for_all_layers():
    first, second = attention_masks(recorded(0, 2), [None, None], True, bias=torch.ones(1, 1, 2, 2))
    assert first[0].tolist() == [[[[1.0, -torch.inf], [1.0, 1.0]]]]
    assert second[0] is first[0]


def test_a_whole_pattern_must_fit_and_leaves_no_query_without_a_key():
    pattern = torch.tensor([[[False, False], [True, False]]])
    mask, _ = masks(recorded(0, 2), pattern=pattern)
    assert mask[0, 0].int().tolist() == [[1, 0], [1, 0]]
    with pytest.raises(ValueError, match="does not fit 3 queries over 3 keys"):
        masks(recorded(0, 3), pattern=pattern)


def test_each_layer_may_have_a_pattern_of_its_own():
    pattern = torch.tensor([[[[True, False], [True, True]], [[True, False], [False, True]]]])
    first, second = attention_masks(recorded(0, 2), [None, None], True, pattern)
    assert first[0][0, 0].int().tolist() == [[1, 0], [1, 1]]
    assert second[0][0, 0].int().tolist() == [[1, 0], [0, 1]]
    with pytest.raises(ValueError, match=r"does not fit .* in 3 layers"):
        attention_masks(recorded(0, 2), [None] * 3, True, pattern)


def test_positions_count_on_from_the_last_real_token():
    cache, x = Cache(CPU), torch.zeros(2, 3, 4)
    real = torch.tensor([[False, True, True], [True, True, True]])
    assert forward_context(x, NoPosition(), [], True, real, cache=cache).positions.tolist() == [[0, 0, 1], [0, 1, 2]]
    assert forward_context(x[:, :1], NoPosition(), [], True, cache=cache).positions.tolist() == [[2], [3]]


MODEL = build(decoder(position=c.Learned(), max_len=16))


def check(*inputs):
    """The check alone: through a model, the tests' own shape checker would refuse first."""
    check_inputs(MODEL.embed, MODEL.decoder, *inputs)


MISTAKES = {
    "no batch dimension": (lambda: check(torch.tensor([1, 2])), "pass \\(batch, length\\)"),
    "fractions": (lambda: check(torch.rand(1, 3)), "tokens are of dtype torch.float32: pass a tensor of whole numbers"),
    "yes and no": (lambda: check(torch.ones(1, 3).bool()), "tokens are of dtype torch.bool"),
    "lists": (lambda: check([[1, 2]]), r"tokens are of type list: pass .* such as torch.tensor\(\[\[1, 2\]\]\)"),
    "a text": (lambda: check("hello"), "tokens are of type str"),
    "an empty sequence": (lambda: MODEL(torch.zeros(1, 0, dtype=torch.long)), "neither of them 0"),
    "a mask of numbers": (lambda: check(tokens(1, 3), torch.ones(1, 3)), "it must be boolean"),
    "a mask of another shape": (lambda: check(tokens(1, 3), torch.ones(1, 4).bool()), "does not fit tokens"),
    "an unknown token": (lambda: MODEL(torch.tensor([[10**6]])), "token id 1000000 is outside the vocabulary"),
    "segments": (lambda: MODEL(tokens(1, 3), segments=torch.zeros(1, 3).long()), "without segment embeddings"),
    "too long": (lambda: MODEL(tokens(1, 17)), "position 16 is outside a learned table of 16"),
    "a large position": (lambda: MODEL(tokens(1, 1), positions=torch.tensor([[16]])), "position 16 is outside"),
    "a negative position": (lambda: MODEL(tokens(1, 1), positions=torch.tensor([[-1]])), "position -1 is outside"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_is_refused_with_its_rule(mistake):
    call, sentence = MISTAKES[mistake]
    with pytest.raises(ValueError, match=sentence):
        call()


def test_a_refused_call_leaves_the_cache_as_it_was():
    cache = MODEL.new_cache()
    MODEL(tokens(1, 15), cache=cache)
    with pytest.raises(ValueError, match="position 16"):
        MODEL(tokens(1, 2), cache=cache)
    assert len(cache) == 15
    MODEL(tokens(1, 1), cache=cache)


def test_padding_takes_no_position():
    """Sixteen real tokens fit a table of sixteen, whatever the padding."""
    mask = torch.ones(1, 20, dtype=torch.bool)
    mask[:, :4] = False
    assert MODEL(tokens(1, 20), mask=mask).shape[1] == 20


def test_counted_positions_are_checked_without_reading_a_tensor(monkeypatch):
    """A device would be waited for at every token, and a CUDA graph could not be captured."""
    cache = MODEL.new_cache()
    MODEL(tokens(1, 3), cache=cache)
    monkeypatch.setattr(type(cache), "next_position", lambda self: pytest.fail("a position was read"))
    MODEL(tokens(1, 2), cache=cache)


SIZES = {"B": 2, "T": 7, "S": 7, "D": variants.D, "H": 6, "G": 2, "K": variants.K, "U": variants.U, "F": variants.F}
SIZES |= {"V": variants.V, "E": 5, "A": 3}


def documented() -> dict[str, tuple[int, ...]]:
    rows = re.findall(r"^ +(\S+) +\(([A-Z,]+)\)", Tap.__doc__, re.M)
    return {name.replace("I", "0"): tuple(SIZES[d] for d in dims.split(",")) for name, dims in rows}


def test_every_documented_site_exists_with_its_shape():
    attention = c.Attention(n_heads=6, n_kv_heads=2, d_head=variants.K, d_value=variants.U)
    expected = documented()
    assert len(expected) > 18
    found = {}
    for feedforward in (c.Dense(d_ff=variants.F), c.MoE(n_experts=5, n_active=3, expert=c.Dense(d_ff=variants.F))):
        placement = "sandwich" if isinstance(feedforward, c.Dense) else "pre"
        model, _ = lively(variants.decoder(attention=attention, feedforward=feedforward, placement=placement))
        tap = Wanting("pattern")
        model(tokens(2, 7), tap=tap)
        found |= {site: tuple(value.shape) for site, value in tap.seen.items() if not site.startswith("blocks.1")}
    assert found == expected


def test_a_tap_can_replace_what_it_sees():
    model, _ = lively(variants.decoder())

    class Silence(Wanting):
        def __call__(self, site, value):
            return torch.zeros_like(value) if site.endswith(("attention.out", "feedforward.out")) else value

    ids = tokens(2, 7)
    tap = Wanting()
    model(ids, tap=tap)
    silenced = model(ids, tap=Silence())
    assert torch.allclose(silenced, model.logits(model.decoder.norm(tap.seen["embed"])), atol=1e-13)


def test_encoder_decoder_sites_carry_their_stack():
    model, _ = lively(variants.seq2seq())
    tap = Wanting("pattern")
    model(tokens(2, 5), tokens(2, 3), tap=tap)
    for site in ("encoder.embed", "encoder.blocks.1.attention.pattern", "decoder.blocks.0.cross.pattern", "logits"):
        assert site in tap.seen
    assert tap.seen["decoder.blocks.0.cross.pattern"].shape == (2, 6, 3, 5)


def test_the_silent_tap_builds_no_strings():
    assert scoped(NO_TAP, "blocks.0.") is NO_TAP
