"""The OV circuit: its factors against the model itself, its scores against matrices written out."""

import pytest
import torch

from glassformer import config as c
from glassformer.lens.copying import copying_score, copying_top, ov_circuit
from glassformer.lens.trace import trace
from tests.variants import decoder, lively

NORMS = {"layer": c.LayerNorm(), "rms": c.RMSNorm()}


def without_biases(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "position" in name:
                parameter.zero_()
    return model


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("placement", ["pre", "parallel"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_circuit_is_what_one_head_adds_to_the_logits(norm, placement, tied):
    """A sequence of one token attends to itself: the head's output, through the last norm with its scale frozen, is a
    row of OV_h up to that scale."""
    head = c.Head(tied=tied, scale=1.7)
    model, _ = lively(decoder(norm=NORMS[norm], placement=placement, head=head))
    without_biases(model)
    circuit = ov_circuit(model, layer=0)
    for token in (0, 7, 30):
        run = trace(model, [[token]])
        outputs = model.blocks[0].attention.o.weight.unflatten(1, (6, 4))
        written = torch.einsum("hu,dhu->hd", run["blocks.0.attention.heads"][0, :, 0], outputs)
        if norm == "layer":
            written = written - written.mean(-1, keepdim=True)
        table = model.embed.tokens.weight if tied else model.head.weight
        expected = (written * model.decoder.norm.weight) @ table.T * 1.7
        torch.testing.assert_close(circuit[:, token], expected, atol=1e-11, rtol=0)


@pytest.mark.parametrize("placement", ["pre", "post", "parallel"])
@pytest.mark.parametrize("layer", [0, 1])
def test_scores_are_those_of_the_matrix_written_out(placement, layer):
    model, _ = lively(decoder(placement=placement))
    full = ov_circuit(model, layer)
    values = torch.linalg.eigvals(full)
    torch.testing.assert_close(
        copying_score(model)[layer], values.real.sum(-1) / values.abs().sum(-1), atol=1e-6, rtol=0
    )
    # the trace needs no eigenvalues at all
    trace_of = full.diagonal(dim1=-2, dim2=-1).sum(-1)
    torch.testing.assert_close(values.real.sum(-1), trace_of, atol=1e-9, rtol=0)
    top = (full.argmax(-1) == torch.arange(31)).double().mean(-1)
    torch.testing.assert_close(copying_top(model)[layer], top)


def test_a_head_that_copies_scores_one_and_its_negative_minus_one():
    config = decoder(vocab_size=13, d_model=14, attention=c.Attention(2, d_head=7), norm=c.RMSNorm(), n_layers=1)
    model, _ = lively(config)
    with torch.no_grad():
        attention = model.blocks[0].attention
        model.embed.tokens.weight.copy_(torch.eye(13, 14))
        for norm in (model.blocks[0].norm_attention, model.decoder.norm):
            norm.weight.fill_(1.0)
        attention.v.weight.copy_(torch.eye(14))
        attention.o.weight.copy_(torch.diag(torch.tensor([1.0] * 7 + [-1.0] * 7)))
    score, top = copying_score(model)[0], copying_top(model)[0]
    torch.testing.assert_close(score, torch.tensor([1.0, -1.0], dtype=torch.float64))
    # head 0 carries seven of the thirteen tokens, head 1 lowers the six others
    torch.testing.assert_close(top, torch.tensor([7 / 13, 0.0], dtype=torch.float64))


def test_tokens_choose_rows_and_columns_and_a_large_vocabulary_is_sampled():
    model, _ = lively(decoder())
    chosen = torch.tensor([3, 11, 12])
    torch.testing.assert_close(ov_circuit(model, 1, chosen), ov_circuit(model, 1)[:, chosen][:, :, chosen])
    assert copying_top(model, most=5).shape == (2, 6)
    assert torch.equal(copying_top(model, most=5, seed=1), copying_top(model, most=5, seed=1))


@pytest.mark.parametrize("head", [None, c.Head(transform="gelu")])
def test_without_a_linear_way_to_logits_there_is_no_circuit(head):
    model, _ = lively(decoder(head=head))
    assert copying_score(model) is copying_top(model) is ov_circuit(model, 0) is None


def test_a_circuit_that_is_zero_has_no_score():
    model, _ = lively(decoder())
    with torch.no_grad():
        model.blocks[0].attention.o.weight.zero_()
    assert copying_score(model)[0].isnan().all()
    assert (copying_top(model)[0] == 0).all()
    assert copying_score(model)[1].isfinite().all()
