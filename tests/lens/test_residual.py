"""Contributions sum to the stream and to the logits, in every architecture, and each is what it is called."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import glassformer as gf
from glassformer import config as c
from glassformer.lens.residual import FrozenNorm, attribute_logits, decompose, head_outputs, stream_norms
from glassformer.lens.sites import LensError, sites_of
from glassformer.lens.trace import trace
from glassformer.model.layers import build_norm
from tests import variants
from tests.sampled import examples
from tests.variants import lively, ragged_mask, tokens


def run(config, seed=0):
    """A lively model and what it is given."""
    model, _ = lively(config, seed=seed)
    extra = {"target": tokens(2, 5, seed=3)} if isinstance(config, c.Seq2SeqConfig) else {}
    return model, tokens(2, 7), extra


@settings(max_examples=examples(60))
@given(config=variants.decoders | variants.encoders | variants.seq2seqs, data=st.data())
def test_contributions_sum_to_the_stream_at_every_depth(config, data):
    model, ids, extra = run(config)
    depths = [s for s in sites_of(config) if s.endswith(("embed", "resid_pre", "resid_mid", "resid_post", "final"))]
    at = data.draw(st.sampled_from(depths))
    result = decompose(model, ids, at, **extra)
    assert result.finding.passed, result.finding.text()
    assert result.finding.bound == 1e-10
    recorded = trace(model, ids, sites=at, **extra)[at]
    assert (result.parts.sum(0) - recorded).abs().max() <= 1e-10
    assert len(set(result.names)) == len(result.names) == len(result.parts)


@settings(max_examples=examples(60))
@given(config=variants.decoders | variants.encoders | variants.seq2seqs, difference=st.booleans())
def test_attribution_sums_to_the_logit(config, difference):
    model, ids, extra = run(config)
    logits = trace(model, ids, sites=(), **extra).logits
    result = attribute_logits(model, ids, 4, 9 if difference else None, position=2, **extra)
    expected = logits[:, 2, 4] - (logits[:, 2, 9] if difference else 0)
    assert result.finding.passed, result.finding.text()
    assert (result.values.sum(0) - expected).abs().max() <= 1e-10
    assert (result.logit - expected).abs().max() <= 1e-10


def test_each_head_is_its_pattern_times_values_times_its_slice_of_the_output_matrix():
    config = variants.decoder(attention=c.Attention(n_heads=6, n_kv_heads=2, d_head=4, d_value=5))
    model, ids, _ = run(config)
    seen, result = trace(model, ids), decompose(model, ids)
    attention = model.blocks[1].attention
    for head in range(6):
        pattern, v = seen["blocks.1.attention.pattern"][:, head], seen["blocks.1.attention.v"][:, head // 3]
        by_hand = pattern @ v @ attention.o.weight[:, head * 5 : (head + 1) * 5].T
        assert (result[f"blocks.1.attention.head.{head}"] - by_hand).abs().max() <= 1e-13
    assert torch.equal(result["embed"], seen["embed"])
    # the trace of everything takes the explicit path, the decomposition the fused one: equal up to rounding
    assert (result["blocks.0.feedforward"] - seen["blocks.0.feedforward.out"]).abs().max() <= 1e-13
    assert torch.equal(result["blocks.1.attention.bias"][1, 3], attention.o.bias)


def test_cross_attention_is_decomposed_by_head():
    model, ids, extra = run(variants.seq2seq())
    result = decompose(model, ids, **extra)
    assert result.site == "decoder.blocks.1.resid_post"
    seen = trace(model, ids, **extra)
    crossed = sum(result[f"decoder.blocks.0.cross.head.{h}"] for h in range(6)) + result["decoder.blocks.0.cross.bias"]
    assert (crossed - seen["decoder.blocks.0.cross.out"]).abs().max() <= 1e-12


def test_a_head_silenced_in_the_model_loses_exactly_its_contribution():
    """The last block's heads reach the stream directly: zeroing one removes its term and nothing else."""
    model, ids, _ = run(variants.decoder(feedforward=c.NoFeedForward()))
    before = decompose(model, ids)
    with torch.no_grad():
        model.blocks[1].attention.o.weight[:, 8:12] = 0  # head 2
    after = decompose(model, ids)
    assert (before.total - after.total - before["blocks.1.attention.head.2"]).abs().max() <= 1e-13
    assert before["blocks.1.attention.head.2"].abs().max() > 1e-3


@pytest.mark.parametrize("spec", [c.LayerNorm(), c.LayerNorm(bias=False), c.RMSNorm(eps=1e-2)], ids=str)
def test_a_frozen_norm_is_the_norm_at_its_own_input_and_linear_elsewhere(spec):
    norm = build_norm(14, spec).double()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
    x, a, b = torch.randn(3, 2, 5, 14, dtype=torch.float64)
    frozen = FrozenNorm.at(norm, x)
    assert (frozen(x) - norm(x)).abs().max() <= 1e-12
    assert (frozen.linear(a + 2 * b) - frozen.linear(a) - 2 * frozen.linear(b)).abs().max() <= 1e-12
    assert (frozen(2 * x) - norm(2 * x)).abs().max() > 0.1  # the control: the norm itself is not linear


def test_a_wrong_contribution_fails_the_finding(monkeypatch):
    """The check can fail: with one head's slice of W_o shifted the sum no longer is the stream."""
    from glassformer.lens import residual

    def shifted(attention, heads):
        return head_outputs(attention, heads.roll(1, dims=1))

    monkeypatch.setattr(residual, "head_outputs", shifted)
    model, ids, _ = run(variants.decoder())
    assert not decompose(model, ids).finding.passed
    assert not attribute_logits(model, ids, 4).finding.passed


def test_one_position_per_row_equals_the_whole_at_that_position():
    config = variants.decoder(placement="post")
    model, ids, _ = run(config)
    whole, one = decompose(model, ids, "final"), decompose(model, ids, "final", position=torch.tensor([6, 2]))
    assert (whole.parts[:, 0, 6] - one.parts[:, 0, 0]).abs().max() <= 1e-13
    assert (whole.parts[:, 1, 2] - one.parts[:, 1, 0]).abs().max() <= 1e-13
    assert (whole.norms()[:, 1, 2] - one.norms()[:, 1, 0]).abs().max() <= 1e-13


def test_padding_and_one_answer_per_row():
    model, ids, _ = run(variants.decoder(head=c.Head(tied=False, bias=True, scale=0.25)))
    mask = ragged_mask([7, 4], 7, "right")
    last = torch.tensor([6, 3])
    result = attribute_logits(model, ids, torch.tensor([4, 8]), torch.tensor([1, 2]), position=last, mask=mask)
    logits = model(ids, mask=mask)
    expected = torch.stack([logits[0, 6, 4] - logits[0, 6, 1], logits[1, 3, 8] - logits[1, 3, 2]])
    assert (result.values.sum(0) - expected).abs().max() <= 1e-10
    assert result["head.bias"].tolist() == (model.head.bias[[4, 8]] - model.head.bias[[1, 2]]).tolist()


def test_the_note_of_a_transformed_head_states_that_it_is_not_linear():
    base = variants.decoder()
    head = c.Head(transform="gelu", bias=True)
    model, ids, _ = run(c.EncoderConfig(**{**base.__dict__, "head": head, "placement": "post"}))
    result = attribute_logits(model, ids, 4)
    assert "not linear" in result.note
    assert result.finding.passed
    assert {"head.transform.bias", "head.norm.bias", "head.bias"} <= set(result.names)
    assert "not linear" not in attribute_logits(*run(base)[:2], 4).note


def test_ranking_and_head_table_hold_the_same_values():
    model, ids, _ = run(variants.decoder())
    result = attribute_logits(model, ids, 4)
    ranked = result.ranked(1)
    assert sorted(name for name, _ in ranked) == sorted(result.names)
    assert [abs(v) for _, v in ranked] == sorted((abs(v) for _, v in ranked), reverse=True)
    assert result.heads().shape == (2, 6, 2)
    assert torch.equal(result.heads()[1, 3], result["blocks.1.attention.head.3"])
    with pytest.raises(LensError, match="no head of 'cross'"):
        result.heads("cross")


def test_norms_by_depth_are_lengths_of_the_recorded_stream():
    model, ids, extra = run(variants.seq2seq())
    seen = trace(model, ids, sites=["*.resid_pre", "*.resid_post", "*.out"], **extra)
    norms = stream_norms(model, ids, **extra)
    assert norms.stream.shape == (3, 2, 5)
    assert torch.equal(norms.stream[0], seen["decoder.blocks.0.resid_pre"].norm(dim=-1))
    assert torch.equal(norms.stream[2], seen["decoder.blocks.1.resid_post"].norm(dim=-1))
    assert torch.equal(norms.branches["cross.out"][1], seen["decoder.blocks.1.cross.out"].norm(dim=-1))
    assert set(stream_norms(*run(variants.decoder(feedforward=c.NoFeedForward()))[:2]).branches) == {"attention.out"}


def test_attribution_holds_in_float32_on_the_bundled_model():
    model = gf.load("bard", dtype="float32")
    result = attribute_logits(model, tokens(2, 40, vocab=65), 5, 7)
    assert result.finding.passed, result.finding.text()
    assert result.finding.bound == 1e-4


def test_errors_name_the_remedy():
    model, ids, _ = run(variants.decoder())
    with pytest.raises(LensError, match=r"attention\.q is not the residual stream: give embed"):
        decompose(model, ids, "blocks.0.attention.q")
    with pytest.raises(LensError, match=r"Did you mean blocks\.0\.resid_"):
        decompose(model, ids, "blocks.0.resid_prae")
    with pytest.raises(LensError, match="position 7 is outside a text of 7 tokens: use -7 to 6"):
        attribute_logits(model, ids, 4, position=7)
    with pytest.raises(LensError, match="token id 31 is outside the vocabulary of 31"):
        attribute_logits(model, ids, 31)
    headless, _ = lively(variants.decoder(head=None))
    with pytest.raises(LensError, match="no head"):
        attribute_logits(headless, ids, 4)
