"""The persistent kernel compiled for the CPU gives the engine's tokens and logits; on a GPU likewise."""

import pytest
import torch

from glassformer import config as c
from glassformer.config import presets
from glassformer.generation import generate
from glassformer.kernels.cuda.decode import decoder as cuda
from glassformer.model import build
from tests.emulated_cuda import needs_compiler
from tests.kernels.cuda.decode.emulated import Emulated
from tests.variants import POSITIONS, decoder, lively

KNOWN = ("none", "learned", "sinusoidal", "rotary-halves", "rotary-interleaved", "rotary-yarn", "rotary-llama3")


def small(name="learned", modern=False, **changes):
    feed = c.Gated(48, bias=True) if modern else c.Dense(136)
    kind = {"feedforward": feed} | ({"window": 7, "norm": c.RMSNorm()} if modern else {})
    changes = {"d_model": 40, "attention__d_head": 16, "head": c.Head(tied=False)} | kind | changes
    return decoder(position=POSITIONS[name], **changes)


@torch.no_grad()
def check(config, prompt=12, clusters=2, dtype=torch.float32, limit=5e-6):
    """Six greedy tokens are the engine's, and so are the last logits; 5e-6: float32 sums in another order."""
    model = lively(config, std=0.4)[0].float()
    if dtype is torch.bfloat16:
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    native, cache = Emulated(model, clusters, dtype, capacity=29), model.new_cache("growing")
    tokens = list(range(3, 3 + prompt))
    tokens.append(int(model(torch.tensor([tokens]), cache=cache)[0, -1].argmax()))
    native.take(cache)
    steps, logits = native.greedy(torch.tensor(tokens[-1:]), 6)
    new = steps[:, 0].tolist()
    wanted = model(torch.tensor([tokens + new[:-1]]))[0, prompt:]
    if dtype is torch.float32:
        assert new == wanted.argmax(-1).tolist()
    assert float((logits[0] - wanted[-1]).abs().max() / wanted.abs().max()) < limit


@pytest.fixture(autouse=True)
def few_threads(monkeypatch):
    monkeypatch.setattr(cuda, "WARPS", 2)
    monkeypatch.setattr(cuda, "NEIGHBOURS", 2)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "modern", "prompt", "clusters"), [("rotary-halves", True, 12, 2), ("learned", False, 1, 1)]
)
def test_it_is_the_engine(name, modern, prompt, clusters):
    check(small(name, modern), prompt, clusters)


@needs_compiler
@pytest.mark.slow
def test_a_cluster_may_have_no_head():
    check(small(attention__n_heads=2, attention__n_kv_heads=1), clusters=3)


@needs_compiler
@pytest.mark.slow
def test_in_bfloat16_it_differs_by_the_rounding_of_keys_and_values():
    check(small(), dtype=torch.bfloat16, limit=2e-2)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("modern", [False, True])
@pytest.mark.parametrize("name", KNOWN)
def test_every_position_scheme_both_kinds_of_block(name, modern):
    for prompt, clusters in ((1, 3), (12, 1), (12, 4)):
        check(small(name, modern), prompt, clusters)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu", "relu2"])
def test_every_activation(activation):
    check(small(feedforward=c.Dense(136, activation=activation)))


@pytest.mark.slow
@needs_compiler
def test_one_step_gives_logits_and_takes_another_token_than_the_likeliest():
    model = lively(small(), std=0.4)[0].float()
    native, cache = Emulated(model, capacity=29), model.new_cache("growing")
    with torch.no_grad():
        model(torch.tensor([[5]]), cache=cache)
        native.take(cache)
        for i, token in enumerate((6, 9, 4)):
            found, wanted = native.step(torch.tensor([token])), model(torch.tensor([[5, 6, 9, 4][: i + 2]]))[:, -1]
            assert torch.allclose(found, wanted, atol=1e-4)


def test_more_tokens_than_the_cache_holds_are_refused(monkeypatch):
    monkeypatch.setattr(cuda, "_clusters", lambda device: 1)
    native = cuda.CudaDecoder(lively(small())[0].float(), 1, 20, torch.float32)
    with pytest.raises(AssertionError):
        native.greedy(torch.tensor([3]), 21)


def test_it_needs_clusters_and_enough_shared_memory(monkeypatch):
    monkeypatch.setattr(cuda, "_clusters", lambda device: 3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    config, device = small(), torch.device("cuda")
    assert cuda.unsupported_device(config, torch.float32, device) is None
    wide = c.replace(config, d_model=4096, feedforward=c.Dense(8192))
    assert "does not fit" in cuda.unsupported_device(wide, torch.float32, device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "no thread block clusters" in cuda.unsupported_device(config, torch.float32, device)


def test_every_pointer_has_its_place():
    assert [name for name, _ in cuda.Arguments._fields_][: len(cuda.TENSORS)] == list(cuda.TENSORS)
    assert len(set(cuda.TENSORS)) == len(cuda.TENSORS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_it_is_the_engine(monkeypatch):
    monkeypatch.undo()  # a GPU has all its threads
    model = build(presets.gpt2(n_layers=2), seed=0, device="cuda").eval()
    found, wanted = (generate(model, [[5, 6, 9]], 24, engine=engine).new for engine in ("native", "torch"))
    assert found == wanted
