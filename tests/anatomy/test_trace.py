"""The trace reads scale, masks, q, k and v from any way to write attention."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from glassformer.anatomy.record import record
from glassformer.anatomy.scores import hidden_keys
from glassformer.anatomy.trace import read_trace
from tests.doctor.probes.subjects import gpt2, t5

H, K = 3, 8


class Written(nn.Module):
    """One causal attention, written in several ways."""

    def __init__(self, way: str):
        super().__init__()
        torch.manual_seed(0)
        self.way, self.table = way, nn.Embedding(29, H * K)
        self.qkv, self.out, self.head = nn.Linear(H * K, 3 * H * K), nn.Linear(H * K, H * K), nn.Linear(H * K, 29)

    def forward(self, idx):
        B, T = idx.shape
        q, k, v = (t.view(B, T, H, K).transpose(1, 2) for t in self.qkv(self.table(idx)).chunk(3, -1))
        mask = torch.ones(T, T, dtype=torch.bool).tril()
        if self.way == "fused":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.way == "einsum":
            scores = torch.einsum("bhtk,bhsk->bhts", q / math.sqrt(K), k)
            y = torch.einsum("bhts,bhsk->bhtk", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)
        elif self.way == "baddbmm":
            flat = [t.reshape(B * H, T, K) for t in (q, k, v)]
            scores = torch.baddbmm(torch.zeros(B * H, T, T), flat[0], flat[1].transpose(1, 2), alpha=K**-0.5)
            y = (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ flat[2]).view(B, H, T, K)
        else:
            scores = q @ k.transpose(-1, -2)
            scores *= K**-0.5
            scores.masked_fill_(~mask, torch.finfo(scores.dtype).min)
            y = F.softmax(scores, dim=-1) @ v
        return self.head(self.out(y.transpose(1, 2).reshape(B, T, -1)))


def traced(model, *tokens):
    graph, logits = record(lambda: model(*tokens), tokens, model, exact=False)
    return read_trace(graph, logits)


def ids(rows, length):
    return torch.randint(0, 29, (rows, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("way", ["fused", "einsum", "baddbmm", "in place"])
def test_every_way_to_write_attention_shows_the_same(way):
    model = Written(way)
    trace = traced(model, ids(2, 7))
    (found,) = trace.attentions
    assert math.isclose(found.scale, K**-0.5, rel_tol=1e-6)
    scores = found.pattern(2)
    assert scores.shape == (2, H, 7, 7)
    assert torch.equal(hidden_keys(scores), ~torch.ones(7, 7, dtype=torch.bool).tril().expand(2, H, 7, 7))
    assert found.v is not None
    assert found.merged is not None
    assert not any(found.rotated)
    assert torch.allclose(trace.logits, model(ids(2, 7)), atol=1e-5)


def test_keys_written_into_a_static_cache_keep_their_lineage():
    """The layer that computed the keys, and the factor on them, are found through the buffer."""

    class Cached(Written):
        def forward(self, idx):
            B, T = idx.shape
            q, k, v = (t.view(B, T, H, K).transpose(1, 2) for t in self.qkv(self.table(idx)).chunk(3, -1))
            keys = torch.zeros(B, H, 16, K)
            keys[:, :, :T] = k * K**-0.5
            return (q @ keys[:, :, :T].transpose(-1, -2)).softmax(-1) @ v

    model = Cached("")
    (found,) = traced(model, ids(2, 7)).attentions
    assert math.isclose(found.scale, K**-0.5, rel_tol=1e-6)
    assert found.maps == {model.qkv.weight.untyped_storage().data_ptr()}
    assert float(found.k.abs().min()) > 0


def test_an_encoder_decoder_shows_all_three_attentions_with_their_paths():
    trace = traced(t5().model.eval(), ids(2, 11), ids(2, 7))
    assert [a.path.split(".")[0] for a in trace.attentions] == ["encoder"] * 2 + ["decoder"] * 4
    assert {tuple(a.scores.shape[-2:]) for a in trace.attentions} == {(11, 11), (7, 7), (7, 11)}


def test_tables_and_activations_are_recorded():
    trace = traced(gpt2().model.eval(), ids(2, 7))
    assert [rows for _, rows, _, _ in trace.lookups] == [61, 80]
    assert {name for _, name in trace.activations} == {"gelu_tanh"}
    assert len(trace.linears) == 2 * 6 + 1


class Sinks(nn.Module):
    """Attention with a learned column that takes a share of each row, first or last."""

    def __init__(self, first):
        super().__init__()
        self.table, self.qkv = nn.Embedding(97, 8), nn.Linear(8, 24)
        self.sink, self.first = nn.Parameter(torch.ones(1)), first

    def forward(self, tokens):
        q, k, v = self.qkv(self.table(tokens)).split(8, -1)
        scores = q @ k.mT / math.sqrt(8)
        extra = self.sink.expand(*scores.shape[:-1], 1)
        both = torch.cat([extra, scores] if self.first else [scores, extra], -1)
        weights = (both - both.amax(-1, keepdim=True)).softmax(-1)
        return (weights[..., 1:] if self.first else weights[..., :-1]) @ v


@pytest.mark.parametrize("first", [True, False])
def test_columns_of_a_sink_are_no_keys(first):
    (one,) = traced(Sinks(first), ids(2, 7)).attentions
    assert one.scores.shape == one.weights.shape == (2, 7, 7)
    assert one.scale == pytest.approx(8**-0.5)
    assert torch.equal(one.contracted, one.weights)
    assert bool((one.weights.sum(-1) < 1).all())
