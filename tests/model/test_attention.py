"""The fused and the explicit path are the same function; heads share keys as documented."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glassformer import config as c
from glassformer.model.attention import Attention, explicit_attention
from glassformer.model.context import AttentionContext
from tests import variants
from tests.sampled import examples
from tests.variants import lively, ragged_mask, tokens


class Wanting:
    """A tap that asks for some sites and keeps what it sees."""

    def __init__(self, *sites: str):
        self.sites, self.seen = sites, {}

    def __call__(self, site, value):
        self.seen[site] = value
        return value

    def wants(self, site):
        return any(site.endswith(s) for s in self.sites)


@settings(max_examples=examples(60))
@given(config=variants.decoders | variants.encoders, padding=st.sampled_from([None, "left", "right"]))
def test_explicit_path_equals_fused_path(config, padding):
    model, _ = lively(config)
    ids = tokens(3, 11)
    mask = None if padding is None else ragged_mask([11, 5, 1], 11, padding)
    fused = model(ids, mask=mask)
    tap = Wanting("pattern")
    explicit = model(ids, mask=mask, tap=tap)
    assert (fused - explicit).abs().max() <= 1e-12
    for layer in range(config.n_layers):
        pattern = tap.seen[f"blocks.{layer}.attention.pattern"]
        total = pattern.sum(-1)
        assert bool((total <= 1).all()) if config.attention.sinks else (total - 1).abs().max() <= 1e-14


def test_the_explicit_path_runs_only_when_asked(monkeypatch):
    calls = []
    monkeypatch.setattr("glassformer.model.attention.explicit_attention", lambda *a: calls.append(a) or a[2])
    model, _ = lively(variants.decoder(attention=c.Attention(n_heads=7)))
    model(tokens(1, 5), tap=Wanting("resid_post"))
    assert not calls
    model(tokens(1, 5), tap=Wanting("blocks.1.attention.scores"))
    assert len(calls) == 1


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_query_head_h_reads_group_h_div_sharing(groups):
    """Keys that single out one key each, values that name their group: the output of head h must name h // (H/G)."""
    heads, width = 6, 5
    q = torch.randn(2, heads, 3, 4, dtype=torch.float64)
    k = torch.randn(2, groups, width, 4, dtype=torch.float64)
    v = torch.arange(groups, dtype=torch.float64).view(1, groups, 1, 1).expand(2, groups, width, 2)
    out = explicit_attention(q, k, v, 1.0)
    expected = torch.arange(heads) // (heads // groups)
    assert torch.allclose(out, expected.double().view(1, heads, 1, 1).expand_as(out), atol=1e-14)


def test_scores_are_scaled_by_one_over_sqrt_k_by_default():
    for scale, expected in [(None, 0.5), (1.0, 1.0), (0.37, 0.37)]:
        attention = Attention(variants.decoder(attention=c.Attention(n_heads=6, d_head=4, scale=scale)))
        assert attention.scale == expected


def test_hand_computed_attention():
    """Two keys with scores 0 and ln 3: weights 1/4 and 3/4."""
    q = torch.tensor([[[[1.0, 0.0]]]], dtype=torch.float64)
    k = torch.tensor([[[[0.0, 5.0], [1.0, 7.0]]]], dtype=torch.float64)
    v = torch.tensor([[[[8.0], [4.0]]]], dtype=torch.float64)
    scale = float(torch.log(torch.tensor(3.0, dtype=torch.float64)))
    assert abs(float(explicit_attention(q, k, v, scale)) - 5.0) < 1e-15


def test_masked_weights_are_exactly_zero():
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)
    tap = Wanting("pattern")
    mask = torch.ones(3, 3, dtype=torch.bool).tril()
    explicit_attention(q, k, k, 1.0, mask, tap=tap)
    assert (tap.seen["pattern"][..., ~mask] == 0).all()
    assert (tap.seen["pattern"][..., mask] > 0).all()


def test_large_scores_stay_finite():
    """Softmax subtracts the row maximum: scores of 1e4, far above exp's limit of 88.7, must not overflow."""
    q = torch.full((1, 1, 2, 1), 100.0)
    out = explicit_attention(q, q, q, 1.0)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_finite_with_padding(dtype):
    model, _ = lively(variants.decoder())
    model = model.to(dtype)
    mask = ragged_mask([9, 4, 1], 9, "left")
    exact, _ = lively(variants.decoder())
    logits, expected = model(tokens(3, 9), mask=mask), exact(tokens(3, 9), mask=mask)
    assert torch.isfinite(logits).all()
    # bf16 keeps 8 bits: about 1 % of logits of size 10 after two layers
    assert (logits.double() - expected)[mask].abs().max() < (0.6 if dtype is torch.bfloat16 else 0.08)


def test_a_wide_mask_loses_its_oldest_columns():
    """A windowed cache returns fewer keys than the sequence has had: masks are cut from the left."""
    attention = Attention(variants.decoder()).double()
    for p in attention.parameters():
        torch.nn.init.normal_(p)
    x = torch.randn(1, 2, variants.D, dtype=torch.float64)
    kv = attention.project_kv(torch.randn(1, 3, variants.D, dtype=torch.float64))
    wide = torch.tensor([[False, False, True, False, True], [True, False, True, True, True]])[None, None]
    cut = attention(x, AttentionContext(wide[..., 2:]), kv=kv)
    assert torch.equal(attention(x, AttentionContext(wide), kv=kv), cut)
