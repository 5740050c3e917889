"""The functions that are exported compute what the models compute, with keys and values as tensors."""

import pytest
import torch

from glassformer import config as c
from glassformer.config import presets
from glassformer.model import build
from glassformer.model.context import NO_TAP
from glassformer.model.moe import MoE
from glassformer.weights.formats.onnx.graphs import DenseMoE, graphs_of, with_dense_experts
from tests.weights.formats.gguf.models import CASES, random

SMALL = {"d_model": 24, "n_layers": 2, "n_heads": 4, "vocab_size": 31}


ROUTERS = [
    {},
    {"normalize": False},
    {"router": c.Router(score="sigmoid", scale=1.5, correction=True, groups=2, top_groups=1, bias=True)},
    {"router": c.Router(groups=2, top_groups=1, group_score="max")},
    {"shared": c.Gated(17), "shared_gate": True},
]


@pytest.mark.parametrize("changes", ROUTERS, ids=str)
def test_dense_experts_give_the_same_sum(changes):
    moe = c.MoE(**({"n_experts": 4, "n_active": 2, "expert": c.Gated(11)} | changes))
    moe = random(c.replace(CASES["mixtral"], feedforward=moe)).blocks[0].feedforward
    if moe.router.correction is not None:
        moe.router.correction = torch.tensor([0.5, -0.2, 0.1, 0.3])
    x = torch.randn(3, 5, 60)
    assert (DenseMoE(moe)(x, NO_TAP) - moe(x, NO_TAP)).abs().max() <= 1e-5


def test_experts_are_replaced_for_a_while_only():
    model = random(CASES["mixtral"])
    names = list(model.state_dict())
    with with_dense_experts(model) as found:
        assert found
        assert not any(type(module) is MoE for module in model.modules())
    assert sum(type(module) is MoE for module in model.modules()) == 3
    assert list(model.state_dict()) == names
    with with_dense_experts(random(CASES["llama"])) as found:
        assert not found


def test_a_decoder_with_its_cache_as_tensors():
    model = random(CASES["llama"])
    (graph,) = graphs_of(model)
    assert list(graph.inputs)[:4] == ["input_ids", "attention_mask", "position_ids", "past_key_values.0.key"]
    assert graph.outputs[:2] == ["logits", "present.0.key"]
    tokens = torch.randint(97, (2, 9))
    past = [torch.zeros(2, 2, 0, 10)] * 6
    mask, positions = torch.ones(2, 9, dtype=torch.long), torch.arange(9).expand(2, 9)
    logits, *past = graph.function(tokens[:, :5], mask[:, :5], positions[:, :5], past)
    later, *_ = graph.function(tokens[:, 5:], mask, positions[:, 5:], past)
    assert (torch.cat([logits, later], 1) - model(tokens)).abs().max() <= 1e-5


def test_the_two_graphs_of_an_encoder_decoder():
    model = build(presets.t5_small(**SMALL, n_encoder_layers=2), seed=0).eval()
    encoder, decoder = graphs_of(model)
    assert (encoder.file, decoder.file) == ("encoder_model.onnx", "decoder_model.onnx")
    source, target, mask = torch.randint(31, (2, 6)), torch.randint(31, (2, 4)), torch.ones(2, 6, dtype=torch.long)
    mask[1, 4:] = 0
    _, *cross = encoder.function(source, mask)
    past = [torch.zeros(2, 4, 0, model.config.d_head)] * 4
    logits, *_ = decoder.function(target, mask, past, cross)
    assert (logits - model(source, target, source_mask=mask.bool())).abs().max() <= 1e-5
    assert set(decoder.inputs) >= {"past_key_values.1.encoder.value", "past_key_values.1.decoder.key"}


def test_an_encoder_with_segments_and_pooler():
    model = build(presets.bert_base(**SMALL), seed=0).eval()
    (graph,) = graphs_of(model)
    assert list(graph.inputs) == ["input_ids", "attention_mask", "token_type_ids"]
    assert graph.outputs[0] == "logits"
    with pytest.raises(TypeError):
        graphs_of(torch.nn.Linear(2, 2))
