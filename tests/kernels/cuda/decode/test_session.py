"""Generation through the CUDA kernels, compiled for the CPU: what `generate` says is what torch says."""

import pytest
import torch

from glassformer import config as c
from glassformer.config import ConfigError
from glassformer.generation import Sampling, generate, loop
from glassformer.generation.engine import Implementation
from glassformer.generation.state import KernelState
from glassformer.kernels.cuda.decode import batch, decoder, session
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
    monkeypatch.setattr(decoder, "_clusters", lambda device: 2)
    monkeypatch.setattr(session, "_compile", lambda *_: None)
    monkeypatch.setattr(session, "CudaDecoder", single)
    monkeypatch.setattr(session, "CudaBatch", several)

    def through(model, request):
        size = (request.capacity, torch.float32)
        if len(request.prompts) == 1:
            made = session.persistent_session(model, *size)
        else:
            made = session.batch_session(model, len(request.prompts), *size)
        state = KernelState(model, made, request.prompts, request.prefill_chunk)
        return state, Implementation("native", "cuda", "float32", "emulated")

    def call(model, *given, **changes):
        wanted = generate(model, *given, engine="torch", **changes)
        with monkeypatch.context() as patch:
            patch.setattr(loop, "make_state", through)
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
    made = session._LAST[model][1]
    monkeypatch.setattr(made, "refresh", lambda model: None)
    held = made.given if hasattr(made, "given") else made.held
    held["last_norm"] = torch.full_like(held["last_norm"], float("nan"))
    with pytest.raises(ConfigError, match="not all numbers"):
        emulated(model, prompts, 8)


def test_a_decoder_belongs_to_one_session_at_a_time(monkeypatch):
    class Made:
        user, limit = None, 2**30

        def __init__(self, model, capacity, dtype):
            self.capacity = capacity

        def refresh(self, model):
            pass

    monkeypatch.setattr(session, "CudaDecoder", Made)
    monkeypatch.setattr(session, "_compile", lambda *_: None)
    monkeypatch.setattr(decoder, "kernel_text", lambda *_: "")
    model = lively(small(), std=0.4)[0].float()
    first = session.persistent_session(model, 20, torch.float32)
    second = session.persistent_session(model, 20, torch.float32)
    assert second.kernel is not first.kernel
    used = second.kernel
    del second
    assert session.persistent_session(model, 20, torch.float32).kernel is used


@needs_compiler
@pytest.mark.slow
def test_a_chunked_prompt_is_the_same(emulated):
    model = lively(small(), std=0.4)[0].float()
    found, wanted = emulated(model, [[3, 4, 5, 6, 7, 8, 9]], 5, prefill_chunk=2)
    assert found == wanted


def test_kernels_are_compiled_before_they_are_needed(monkeypatch):
    model = lively(small())[0].float()
    monkeypatch.setattr(decoder, "_clusters", lambda device: 3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    made = []
    monkeypatch.setattr(session.nvrtc, "compiled", lambda text, capability: made.append(text))
    session.persistent_session(model, 8, torch.float32)
    assert made == [decoder.kernel_text(model, torch.float32)]
    made.clear()
    session.batch_session(model, 2, 8, torch.float32)
    assert made == list(batch.kernel_texts(model, torch.float32).values())


def test_one_sequence_needs_clusters_and_enough_shared_memory(monkeypatch):
    monkeypatch.setattr(decoder, "_clusters", lambda device: 3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    config, device = small(), torch.device("cuda")
    assert decoder.unsupported_device(config, torch.float32, device) is None
    wide = c.replace(config, d_model=4096, feedforward=c.Dense(8192))
    assert "does not fit" in decoder.unsupported_device(wide, torch.float32, device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "no thread block clusters" in decoder.unsupported_device(config, torch.float32, device)
