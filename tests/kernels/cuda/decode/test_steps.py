"""Generation through the CUDA kernels, compiled for the CPU: what `generate` says is what torch says."""

import pytest
import torch

from glassformer.config import ConfigError
from glassformer.generation import Sampling
from glassformer.generation.engine import Implementation
from glassformer.generation.state import CapturedState
from glassformer.kernels.cuda.decode import batch, decoder, steps
from glassformer.kernels.decode import DECODE_KERNELS
from tests.emulated_cuda import both_ways, needs_compiler
from tests.kernels.cuda.decode.emulated import Emulated
from tests.kernels.cuda.decode.test_batch import Emulated as EmulatedBatch
from tests.kernels.cuda.decode.test_decoder import small
from tests.variants import lively

KERNELS = {kernel.name: kernel for kernel in DECODE_KERNELS}


@pytest.fixture
def emulated(monkeypatch):
    """`generate` on a CPU goes through the kernels of GPUs."""
    monkeypatch.setattr(decoder, "WARPS", 2)
    monkeypatch.setattr(decoder, "NEIGHBOURS", 2)
    monkeypatch.setattr(batch, "WARPS", dict.fromkeys(batch.WARPS, 2))
    single = lambda model, rows, capacity, dtype: Emulated(model, 2, dtype, capacity)  # noqa: E731
    several = lambda model, rows, capacity, dtype: EmulatedBatch(model, rows, capacity, dtype)  # noqa: E731
    monkeypatch.setattr(steps, "KINDS", {"persistent": single, "batch": several})

    def through(model, request):
        kernel = KERNELS["cuda-persistent" if len(request.prompts) == 1 else "cuda-batch"]
        prompts, new, chunk = request.prompts, request.max_new_tokens, request.prefill_chunk
        state = CapturedState(model, prompts, new, chunk, kernel, "float32")
        return state, Implementation("native", "cuda", "float32", "emulated")

    return both_ways(monkeypatch, through)


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
def test_logits_that_are_no_numbers_are_refused(prompts, emulated):
    model = lively(small(), std=0.4)[0].float()
    emulated(model, prompts, 2)
    made = steps._LAST[model][1]
    held = made.given if hasattr(made, "given") else made.held
    held["last_norm"] = torch.full_like(held["last_norm"], float("nan"))
    with pytest.raises(ConfigError, match="not all numbers"):
        emulated(model, prompts, 8)


class User:
    """A generation."""


class Made:
    """In place of a decoder."""

    user = None

    def __init__(self, model, rows, capacity, dtype):
        self.capacity, self.dtype, self.taken = capacity, dtype, []

    def take(self, filled):
        self.taken.append(filled)


def test_a_decoder_belongs_to_one_generation_at_a_time_and_is_used_again(monkeypatch):
    monkeypatch.setattr(steps, "KINDS", dict.fromkeys(("persistent", "batch"), Made))
    model, users = lively(small(), std=0.4)[0].float(), [User(), User()]

    def chosen(user, kind="persistent", rows=1, slots=256, precision="float32"):
        return steps.small_model_steps(kind, model, "a cache", rows, slots, precision, user=user)

    first, second = map(chosen, users)
    assert second is not first
    users.pop()
    third = chosen(users[0])
    assert third is second
    assert third.taken == ["a cache"] * 2
    users.clear()
    for changes in ({"kind": "batch"}, {"rows": 2}, {"slots": 512}, {"precision": "bfloat16"}):
        before = chosen(None)
        assert chosen(None) is before
        assert chosen(None, **changes) is not before
    before = chosen(None, slots=512)
    assert chosen(None) is before  # it has room for more
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    assert chosen(None) is not before
    assert chosen(None, precision="float16").dtype is torch.float32


@needs_compiler
@pytest.mark.slow
def test_a_chunked_prompt_is_the_same(emulated):
    model = lively(small(), std=0.4)[0].float()
    found, wanted = emulated(model, [[3, 4, 5, 6, 7, 8, 9]], 5, prefill_chunk=2)
    assert found == wanted
