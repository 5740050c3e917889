"""The persistent kernel compiled for the CPU gives the engine's tokens and logits; on a GPU likewise."""

import pytest
import torch

from glassformer import config as c
from glassformer.config import presets
from glassformer.generation import generate
from glassformer.kernels.cuda.decode import decoder as cuda
from glassformer.kernels.cuda.decode.library import CudaDecodeError
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
def check(config, folder, prompt=12, clusters=2, dtype=torch.float32, limit=5e-6):
    """Six greedy tokens are the engine's, and so are the last logits; 5e-6: float32 sums in another order."""
    model = lively(config, std=0.4)[0].float()
    if dtype is torch.bfloat16:
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    native = Emulated(model, folder, clusters, dtype, capacity=29)
    tokens, kept = list(range(3, 3 + prompt)), []
    if prompt > 1:
        cache = model.new_cache("growing")
        model(torch.tensor([tokens[:-1]]), cache=cache)
        kept = [(layer.k[0], layer.v[0]) for layer in cache.layers]
    native.take(tokens, kept)
    new = native.greedy(6).tolist()
    wanted = model(torch.tensor([tokens + new[:-1]]))[0, prompt - 1 :]
    if dtype is torch.float32:
        assert new == wanted.argmax(-1).tolist()
    assert float((native.logits - wanted[-1]).abs().max() / wanted.abs().max()) < limit


@pytest.fixture(autouse=True)
def few_threads(monkeypatch):
    monkeypatch.setattr(cuda, "WARPS", 2)
    monkeypatch.setattr(cuda, "NEIGHBOURS", 2)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "modern", "prompt", "clusters"), [("rotary-halves", True, 12, 3), ("learned", False, 1, 1)]
)
def test_it_is_the_engine(name, modern, prompt, clusters, tmp_path):
    check(small(name, modern), tmp_path, prompt, clusters)


@needs_compiler
@pytest.mark.slow
def test_a_cluster_may_have_no_head(tmp_path):
    check(small(attention__n_heads=2, attention__n_kv_heads=1), tmp_path, clusters=3)


@needs_compiler
@pytest.mark.slow
def test_in_bfloat16_it_differs_by_the_rounding_of_keys_and_values(tmp_path):
    check(small(), tmp_path, dtype=torch.bfloat16, limit=2e-2)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("modern", [False, True])
@pytest.mark.parametrize("name", KNOWN)
def test_every_position_scheme_both_kinds_of_block(name, modern, tmp_path):
    for prompt, clusters in ((1, 3), (12, 1), (12, 4)):
        folder = tmp_path / f"{prompt}-{clusters}"  # another number of clusters is another kernel: a name loads once
        folder.mkdir()
        check(small(name, modern), folder, prompt, clusters)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu", "relu2"])
def test_every_activation(activation, tmp_path):
    check(small(feedforward=c.Dense(136, activation=activation)), tmp_path)


@pytest.mark.slow
@needs_compiler
def test_one_step_gives_logits_and_takes_another_token_than_the_likeliest(tmp_path):
    model = lively(small(), std=0.4)[0].float()
    native = Emulated(model, tmp_path, capacity=29)
    native.take([5, 6], [])
    native.position = 0
    with torch.no_grad():
        for i, token in enumerate((5, 6, 9)):
            found, wanted = native.step(token), model(torch.tensor([[5, 6, 9][: i + 1]]))[0, -1]
            assert torch.allclose(found, wanted, atol=1e-4)


def test_refusals_are_one_sentence():
    with pytest.raises(CudaDecodeError, match="use engine='torch'"):
        cuda.CudaDecoder(lively(decoder(placement="post"))[0], clusters=1)
    native = cuda.CudaDecoder(lively(small())[0].float(), clusters=1)
    with pytest.raises(CudaDecodeError, match="more do not fit"):
        native.greedy(native.capacity + 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_it_is_the_engine(monkeypatch):
    monkeypatch.undo()  # a GPU has all its threads
    model = build(presets.gpt2(n_layers=2), seed=0, device="cuda").eval()
    found, wanted = (generate(model, [[5, 6, 9]], 24, engine=engine).new for engine in ("native", "torch"))
    assert found == wanted
