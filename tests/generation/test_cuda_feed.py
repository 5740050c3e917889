"""Generation through the CUDA kernels, compiled for the CPU: what `generate` says is what torch says."""

from types import SimpleNamespace

import pytest
import torch

from glassformer.config import ConfigError
from glassformer.generation import Sampling, generate, loop
from glassformer.generation import cuda_feed as feed
from glassformer.kernels.cuda.decode import batch, decoder
from glassformer.kernels.cuda.decode.library import CudaDecodeError
from tests.emulated_cuda import needs_compiler
from tests.kernels.cuda.decode.emulated import Emulated
from tests.kernels.cuda.decode.test_batch import Emulated as EmulatedBatch
from tests.kernels.cuda.decode.test_decoder import small
from tests.variants import decoder as plain
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
    monkeypatch.setattr(feed, "CudaDecoder", single)
    monkeypatch.setattr(feed, "CudaBatch", several)

    def through(model, rows, max_new_tokens, cache, chunk, engine, precision, beams=1):
        return feed.CudaFeed(model, rows, max_new_tokens, chunk, precision)

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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cache": None}, "cache of their own kind"),
        ({"precision": "int8"}, "is for CPUs"),
        ({"beams": 3}, "beams"),
        ({"config": plain()}, "heads other than"),
    ],
)
def test_what_they_cannot_do_is_said_only_where_they_were_asked_for(changes, words, monkeypatch):
    given = {"cache": "static", "precision": "float32", "beams": 1, "config": small()} | changes
    model = lively(given.pop("config"))[0].float()
    with pytest.raises(CudaDecodeError, match=words):
        feed.chosen(model, given["cache"], "native", given["precision"], 1, given["beams"])
    assert not feed.chosen(model, given["cache"], "torch", given["precision"], 1, given["beams"])
    if given["precision"] == "float32":
        assert not feed.chosen(model, given["cache"], "auto", given["precision"], 1, given["beams"])


def test_auto_takes_them_once_they_are_compiled(monkeypatch):
    model = lively(small())[0].float()
    machine = SimpleNamespace(capability=(9, 0))
    monkeypatch.setattr(decoder, "_clusters", lambda device: 3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: machine.capability)
    known = set()
    monkeypatch.setattr(feed.nvrtc, "is_compiled", lambda text, capability: text in known)
    assert not feed.chosen(model, "static", "auto", "float32", 1)
    known.update([decoder.kernel_text(model, torch.float32), decoder.PROBE])
    assert feed.chosen(model, "static", "auto", "float32", 1)
    assert not feed.chosen(model, "static", "auto", "float32", 2)
    known.update(batch.kernel_texts(model, torch.float32).values())
    assert feed.chosen(model, "static", "auto", "float32", 2)
    assert feed.chosen(model, "static", "auto", "bfloat16", 1)
    known.difference_update([decoder.kernel_text(model, torch.float32)])
    assert not feed.chosen(model, "static", "auto", "float32", 1)
    machine.capability = (8, 0)  # without clusters one row is taken as many are
    assert feed.chosen(model, "static", "auto", "float32", 1)
