"""Generation through the CUDA kernels, compiled for the CPU: what `generate` says is what torch says."""

from types import SimpleNamespace

import pytest
import torch

from glassformer.config import ConfigError
from glassformer.generation import Sampling, generate, loop
from glassformer.generation import cuda_feed as feed
from glassformer.generation.engine import Implementation
from glassformer.kernels.cuda.decode import batch, decoder
from tests.emulated_cuda import needs_compiler
from tests.kernels.cuda.decode.emulated import Emulated
from tests.kernels.cuda.decode.test_batch import Emulated as EmulatedBatch
from tests.kernels.cuda.decode.test_decoder import small
from tests.variants import lively


@pytest.fixture
def emulated(monkeypatch, tmp_path):
    """`generate` on a CPU goes through the kernels of GPUs."""
    monkeypatch.setattr(decoder, "WARPS", 2)
    monkeypatch.setattr(decoder, "NEIGHBOURS", 2)
    monkeypatch.setattr(batch, "WARPS", dict.fromkeys(batch.WARPS, 2))
    single = lambda model, capacity, dtype: Emulated(model, tmp_path, 2, dtype, capacity)  # noqa: E731
    several = lambda model, rows, capacity, dtype: EmulatedBatch(model, rows, capacity, tmp_path, dtype)  # noqa: E731
    monkeypatch.setattr(decoder, "can_run", lambda model, dtype: True)
    monkeypatch.setattr(feed, "compile_kernels", lambda *_: None)
    monkeypatch.setattr(feed, "CudaDecoder", single)
    monkeypatch.setattr(feed, "CudaBatch", several)

    def through(model, rows, max_new_tokens, cache, chunk, engine, precision, beams=1):
        chosen = Implementation("native", "cuda", "float32", "emulated")
        return feed.CudaFeed(model, rows, max_new_tokens, chunk, chosen.precision), chosen

    def call(model, *given, **changes):
        wanted = generate(model, *given, engine="torch", **changes)
        with monkeypatch.context() as patch:
            patch.setattr(loop, "_feed", through)
            return generate(model, *given, **changes), wanted

    return call


@needs_compiler
@pytest.mark.parametrize(
    "prompts",
    [[[3, 4, 5], [6, 2], [9, 8, 1]], *(pytest.param(p, marks=pytest.mark.slow) for p in ([[3, 4, 5]], [[7]]))],
)
def test_greedy_is_torchs(prompts, emulated):
    model = lively(small(), std=0.4)[0].float()
    found, wanted = emulated(model, prompts, 5)
    assert found == wanted


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("prompts", [[[3, 4, 5]], [[3, 4, 5], [6, 2]]])
def test_sampling_stops_and_changed_weights_are_torchs(prompts, emulated):
    model = lively(small(), std=0.4)[0].float()
    found, wanted = emulated(model, prompts, 3, Sampling(top_k=5, repetition_penalty=1.3), seed=4)
    assert found == wanted
    stop = wanted.new[0][1]
    found, wanted = emulated(model, prompts, 3, Sampling(top_k=5, repetition_penalty=1.3), seed=4, stop=[stop])
    assert found == wanted
    assert found.finished == wanted.finished
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.mul_(1.1)
    found, wanted = emulated(model, prompts, 2)
    assert found == wanted


@needs_compiler
@pytest.mark.parametrize("prompts", [[[3, 4, 5]], pytest.param([[3, 4, 5], [6, 2]], marks=pytest.mark.slow)])
def test_logits_that_are_no_numbers_are_refused(prompts, emulated, monkeypatch):
    model = lively(small(), std=0.4)[0].float()
    emulated(model, prompts, 2)
    made = feed._MADE[model][1]
    monkeypatch.setattr(made, "refresh", lambda model: None)
    held = made.given if hasattr(made, "given") else made.held
    held["last_norm"] = torch.full_like(held["last_norm"], float("nan"))
    with pytest.raises(ConfigError, match="not all numbers"):
        emulated(model, prompts, 8)


@needs_compiler
@pytest.mark.slow
def test_a_chunked_prompt_is_the_same(emulated):
    model = lively(small(), std=0.4)[0].float()
    found, wanted = emulated(model, [[3, 4, 5, 6, 7, 8, 9]], 5, prefill_chunk=2)
    assert found == wanted


def test_kernels_are_compiled_before_they_are_needed(monkeypatch):
    model = lively(small())[0].float()
    machine = SimpleNamespace(capability=(9, 0))
    monkeypatch.setattr(decoder, "_clusters", lambda device: 3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: machine.capability)
    made = []
    monkeypatch.setattr(feed.nvrtc, "compiled", lambda text, capability: made.append(text))
    feed.compile_kernels(model, 1, torch.float32)
    assert made == [decoder.kernel_text(model, torch.float32)]
    made.clear()
    feed.compile_kernels(model, 2, torch.float32)
    assert made == list(batch.kernel_texts(model, torch.float32).values())
    made.clear()
    machine.capability = (8, 0)  # without clusters one sequence is decoded as several are
    feed.compile_kernels(model, 1, torch.bfloat16)
    assert made == list(batch.kernel_texts(model, torch.bfloat16).values())
