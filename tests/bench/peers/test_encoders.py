"""Encoders and encoder-decoders: every contender computes what our torch engine computes."""

import importlib

import pytest
import torch

import glassformer as gf
from tests.bench import tiny
from tests.cli.asking import has_compiler

NEEDS = {"glassformer": "torch", "glassformer-torch": "torch", "transformers": "transformers"}
NEEDS |= {"onnxruntime": "onnxruntime", "ctranslate2": "ctranslate2"}
MODULES = {"glassformer": "ours", "glassformer-torch": "ours", "transformers": "hugging"}
MODULES |= {"onnxruntime": "onnxrt", "ctranslate2": "ctranslate"}


def module_of(name):
    pytest.importorskip(NEEDS[name], reason="a peer that is not installed here")
    if name == "glassformer" and not has_compiler():
        pytest.skip("no C++ compiler")
    return importlib.import_module(f"glassformer.bench.peers.{MODULES[name]}")


@pytest.mark.parametrize("name", ["glassformer", "glassformer-torch", "transformers", "onnxruntime"])
def test_hidden_states_of_unequal_texts(encoder, name):
    module = module_of(name)
    order = tiny.order(encoder, name, MODULES[name], task="encode")
    if hasattr(module, "prepare"):
        module.prepare(order)
    texts = encoder.texts(5, 20, seed=0)
    found = module.Encoder(order).encode(texts)
    model = gf.load(encoder.root / "hf")
    for text, states in zip(texts, found, strict=True):
        with torch.no_grad():
            wanted = model.encode(torch.tensor([text]))[0]
        assert float((torch.as_tensor(states) - wanted).abs().max() / wanted.abs().max()) < 1e-4


def test_onnxruntime_quantises_an_encoder(encoder):
    """Its quantiser cannot infer the types behind fused operators by itself."""
    module = module_of("onnxruntime")
    order = tiny.order(encoder, "onnxruntime", "onnxrt", "int8", task="encode")
    module.prepare(order)
    texts = encoder.texts(3, 12, seed=0)
    found = module.Encoder(order).encode(texts)
    model = gf.load(encoder.root / "hf")
    for text, states in zip(texts, found, strict=True):
        with torch.no_grad():
            wanted = model.encode(torch.tensor([text]))[0]
        error = float((torch.as_tensor(states) - wanted).abs().max() / wanted.abs().max())
        assert 1e-5 < error < 0.2  # rounded, and the same model


@pytest.mark.parametrize("name", ["glassformer", "transformers", "ctranslate2"])
def test_tokens_of_an_encoder_decoder(seq2seq, name):
    module = module_of(name)
    order = tiny.order(seq2seq, name, MODULES[name], new=6)
    if hasattr(module, "prepare"):
        module.prepare(order)
    marks = []
    made = module.Peer(order).generate(order.prompts, order.new, lambda: marks.append(1))
    assert made == tiny.engine_ids(seq2seq, order)
    assert len(marks) == order.new
