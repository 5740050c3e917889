"""Prompts that the kernels prepare, emulated on a CPU, give the hidden states and the KV cache of the engine."""

import copy
import dataclasses
import gc
import weakref
from typing import ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from glassformer import config as c
from glassformer.generation import engine, loop, state
from glassformer.generation.request import GenerationRequest
from glassformer.kernels.cuda.graph import captured_prompt, prompt
from glassformer.kernels.cuda.graph.launches import Launch
from glassformer.kernels.decode import DECODE_KERNELS
from glassformer.model import build
from glassformer.model.layers import build_norm
from glassformer.model.transformer import modules_of
from tests.emulated_cuda import needs_compiler
from tests.kernels.cuda.graph.emulated import on_cpu  # noqa: F401
from tests.kernels.cuda.graph.test_fused import ENGINE, VARIANTS, V, config

T, SLOTS = 7, 12
pytestmark = [needs_compiler, pytest.mark.usefixtures("on_cpu")]
BOUND = 2.5
"""Errors are measured in those of the engine in the same dtype, which rounds at other places."""


def models(cfg: c.DecoderConfig, dtype: torch.dtype):
    """Return a model in float32 and in `dtype`, with the same weights."""
    cfg = dataclasses.replace(cfg, init_std=0.3)
    exact, generator = build(cfg, seed=1).eval(), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in exact.named_parameters():
            if "norm" in name or name.endswith(("bias", "sinks")):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
            parameter.copy_(parameter.to(dtype).float())
    half = build(cfg, seed=1).eval()
    half.load_state_dict(exact.state_dict())
    return exact, half.to(dtype)


def reader_of(model):
    return prompt.prompt_reader(model, modules_of(model))


def read(model, ids, real=None, chunk=T, reader=None):
    """Return the last hidden states and the filled keys and values of each layer, after a prompt read in chunks."""
    cache = model.new_cache("static", capacity=SLOTS)
    with torch.no_grad():
        for first in range(0, ids.shape[1], chunk):
            tokens = ids[:, first : first + chunk]
            mask = None if real is None else real[:, first : first + chunk]
            if reader is None:
                hidden = model.decoder(model.embed(tokens), mask, cache=cache)
            else:
                hidden = reader(tokens, mask, cache)
    return hidden[:, -1:], [(s.k[:, :, : cache.length], s.v[:, :, : cache.length]) for s in cache.layers]


def difference(found, wanted) -> float:
    return float((found.float() - wanted).abs().max() / wanted.abs().max())


def worst(cfg, dtype=torch.float16, batch: int = 2, real=None, chunk: int = T) -> float:
    """Return the largest error of hidden states, keys and values, divided by the largest of the engine in `dtype`."""
    exact, half = models(cfg, dtype)
    ids = torch.randint(0, V, (batch, T), generator=torch.Generator().manual_seed(5))
    reader = reader_of(half)
    assert reader is not None
    wanted, kept = read(exact, ids, real, chunk)
    seen = torch.ones(batch, T, dtype=torch.bool) if real is None else real

    def error(found, stored) -> float:
        caches = [
            difference(a.transpose(1, 2)[seen], b.transpose(1, 2)[seen])
            for mine, theirs in zip(stored, kept, strict=True)
            for a, b in zip(mine, theirs, strict=True)
        ]
        return max(difference(found, wanted), *caches)

    return error(*read(half, ids, real, chunk, reader)) / error(*read(half, ids, real, chunk))


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_a_llama_like_model(dtype):
    assert worst(config(), dtype) < BOUND


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_every_part(name):
    assert worst(config(**VARIANTS[name])) < BOUND


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINE)
def test_what_the_kernels_do_not_support_is_computed_by_the_modules(name):
    changes, _ = ENGINE[name]
    assert worst(config(**changes)) < BOUND


def test_padded_prompts_have_positions_of_their_own():
    real = torch.ones(2, T, dtype=torch.bool)
    real[1, :3] = False
    assert worst(config(), real=real) < BOUND


def test_a_prompt_in_chunks():
    assert worst(config(), chunk=3) < BOUND


@pytest.mark.parametrize("kernel", ["prepare_heads", "apply_gate", "normalize"])
def test_a_kernel_that_does_nothing_is_noticed(kernel, monkeypatch):
    run = Launch.run
    monkeypatch.setattr(Launch, "run", lambda self: None if self.kernel == kernel else run(self))
    assert not worst(config()) < 10 * BOUND  # or NaN


@pytest.mark.slow
@pytest.mark.parametrize(("fraction", "d_head"), [(0.5, 16), (0.75, 32), (0.5, 64), (1.0, 24)])
def test_pairs_that_are_half_of_the_rotated_numbers_apart(fraction, d_head):
    """Rotated numbers that are a multiple of 16, so that a thread has eight partners in one other, and others."""
    cfg = config(attention=c.Attention(4, 2, d_head=d_head), position=c.Rotary(fraction=fraction))
    assert worst(cfg) < BOUND


NORMS = (c.RMSNorm(), c.RMSNorm(offset=1.0), c.LayerNorm(), c.LayerNorm(bias=False), c.RMSNorm(weight=False))


@pytest.mark.parametrize(("width", "spec"), [(64, NORMS[0]), (1024, NORMS[1]), (1088, NORMS[2]), (3264, NORMS[3])])
def test_norms_of_rows_that_one_or_several_warps_have(width, spec):
    """Plain, added to a stream, and of the sum; an odd number of rows, so that a block has one that does not exist."""
    half = build(config(residual_scale=0.5), seed=0).half()
    norm = build_norm(width, spec).half()
    generator = torch.Generator().manual_seed(7)
    for parameter in norm.parameters():
        parameter.data.copy_(torch.rand(width, generator=generator))
    x, stream = (torch.randn(3, width, generator=generator).half() + 1 for _ in range(2))
    reader = reader_of(half)
    with torch.no_grad():
        exact = copy.deepcopy(norm).float()
        wanted = [exact(x.float()), stream + 0.5 * exact(x.float()), exact(stream + 0.5 * x.float())]
        found = [reader._norm(norm, x)]
        found += [reader._norm(norm, x, stream.clone(), is_last=is_last) for is_last in (False, True)]
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=1e-3, atol=2e-3)


def test_a_norm_in_another_dtype_is_computed_by_its_module(monkeypatch):
    launched = []
    run = Launch.run
    monkeypatch.setattr(Launch, "run", lambda self: (launched.append(self.kernel), run(self)))
    exact, half = models(config(n_layers=1), torch.float16)
    ids = torch.randint(0, V, (1, T), generator=torch.Generator().manual_seed(8))
    read(half, ids, reader=reader_of(half))
    assert launched.count("normalize") == 2
    assert prompt.reads_norm(half.decoder.norm, torch.float16)
    assert not prompt.reads_norm(exact.decoder.norm, torch.float16)
    shifted = torch.nn.Parameter(torch.ones(65, dtype=torch.float16)[1:])  # not aligned to 16 bytes
    half.decoder.blocks[0].norm_attention.weight = shifted
    launched.clear()
    read(half, ids, reader=reader_of(half))
    assert launched.count("normalize") == 1


def test_weights_are_read_in_place_and_a_reader_is_made_again_when_they_move():
    cfg = config(attention=c.Attention(4, 2, d_head=16, qk_norm=c.RMSNorm()))
    exact, half = models(cfg, torch.float16)
    made = reader_of(half)
    ids = torch.randint(0, V, (1, T), generator=torch.Generator().manual_seed(9))
    before = read(half, ids, reader=made)[0]
    with torch.no_grad():
        for model in (exact, half):
            for name in ("attention.q_norm", "norm_feedforward"):
                model.decoder.blocks[0].get_submodule(name).weight.mul_(-2.0)
    assert reader_of(half) is made
    found, wanted = read(half, ids, reader=made)[0], read(exact, ids)[0]
    assert difference(found, wanted) < 1e-2 < difference(before, wanted)
    half.decoder.blocks[1].norm_attention.weight = torch.nn.Parameter(torch.ones(64, dtype=torch.float16))
    assert reader_of(half) is not made


def test_a_reader_keeps_no_model_alive():
    _, half = models(config(), torch.float16)
    made = reader_of(half)
    watched = weakref.ref(half)
    del half, made
    gc.collect()
    assert watched() is None


def test_models_without_kernels_have_no_reader():
    assert reader_of(build(config(), seed=0)) is None  # float32
    narrow = config(d_model=32, attention=c.Attention(2, d_head=16))
    assert reader_of(build(narrow, seed=0).half()) is None


def test_generation_reads_prompts_with_the_kernel_and_steps_eagerly_if_few_tokens_follow():
    exact, half = models(config(), torch.float16)
    graph = DECODE_KERNELS[-1]
    prompts = torch.randint(0, V, (2, T), generator=torch.Generator().manual_seed(4)).tolist()
    made = state.CapturedState(half, prompts, 2, None, graph, "float16", captures=False)
    assert isinstance(made.reader, prompt.PromptReader)
    assert made.begin is None
    ids = torch.tensor(prompts)
    with torch.no_grad():
        assert difference(made.start(), exact(ids)[:, -1]) < 1e-2
        more = torch.tensor([5, 6])
        wanted = exact(torch.cat([ids, more[:, None]], 1))[:, -1]
        assert difference(made.step(more), wanted) < 1e-2


@pytest.mark.parametrize("captured", [prompt.CAPTURED, 0])
@pytest.mark.parametrize("short", [0, 3])
def test_without_a_step_after_them_prompts_keep_no_cache(captured, short, monkeypatch):
    """The logits are those of a generation that goes on. Captured or not, of equal lengths or not."""
    monkeypatch.setattr(prompt, "CAPTURED", captured)
    _, half = models(config(), torch.float16)
    ids = torch.randint(0, V, (2, T), generator=torch.Generator().manual_seed(4)).tolist()
    prompts = [ids[0], ids[1][short:]]

    def made(new, chunk=None):
        return state.CapturedState(half, prompts, new, chunk, DECODE_KERNELS[-1], "float16", captures=False)

    with torch.no_grad():
        going_on = made(2)
        wanted = going_on.start()
        allocated = []
        allocate = prompt.PromptReader.allocate
        monkeypatch.setattr(prompt.PromptReader, "allocate", lambda *given: (allocated.append(0), allocate(*given))[1])
        one = made(1)
        assert torch.equal(one.start(), wanted)
        assert one.cache is None
        assert bool(allocated) == bool(short or not captured)  # a captured prompt has buffers of its own
        after = torch.tensor([5, 6])
        assert difference(one.step(after), going_on.step(after).float()) < 1e-2  # computed anew
        assert made(1, chunk=3).cache is not None  # later chunks read it


def test_the_host_waits_for_the_device_once(monkeypatch):
    """A replayed prompt and its first token: every scalar or list that is read from a tensor waits for a GPU."""
    _, half = models(config(), torch.float16)
    prompts = torch.randint(0, V, (1, T), generator=torch.Generator().manual_seed(4)).tolist()
    waits = []
    for name in ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "cpu"):
        read_it = getattr(torch.Tensor, name)

        def counted(self, *rest, name=name, read_it=read_it):
            waits.append(name)
            return read_it(self, *rest)

        monkeypatch.setattr(torch.Tensor, name, counted)
    for _ in range(2):
        waits.clear()
        request = GenerationRequest(prompts, max_new_tokens=1)
        made = state.CapturedState(half, request.prompts, 1, None, DECODE_KERNELS[-1], "float16", captures=False)
        assert len(list(loop.Steps(made, request, engine.Implementation("native", "cpu", "float16", "tested")))) == 1
        assert waits == ["tolist"]


class Noting(TorchDispatchMode):
    """Note the operations of torch, apart from views and memory."""

    noted: ClassVar[list[str]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.partition(".")[0]
        if not func.is_view and not name.startswith("empty"):
            Noting.noted.append(name)
        return func(*args, **(kwargs or {}))


def operations_of_a_prompt(monkeypatch) -> list[str]:
    """Return what a generation of one token launches, and what it calls that takes long, in order."""
    half = models(config(), torch.float16)[1]
    prompts = torch.randint(0, V, (1, T), generator=torch.Generator().manual_seed(4)).tolist()
    run, linear, note = Launch.run, prompt.F.linear, Noting.noted.append
    monkeypatch.setattr(Launch, "run", lambda self: (note(self.kernel), run(self)))
    monkeypatch.setattr(prompt.F, "linear", lambda *given: (note("matmul"), linear(*given))[1])
    for name in ("context", "allocate"):
        made = getattr(prompt.PromptReader, name)
        monkeypatch.setattr(prompt.PromptReader, name, lambda *a, name=name, made=made: (note(name), made(*a))[1])
    for _ in range(2):
        Noting.noted.clear()
        request = GenerationRequest(prompts, max_new_tokens=1)
        with Noting():
            made = state.CapturedState(half, prompts, 1, None, DECODE_KERNELS[-1], "float16", captures=False)
            list(loop.Steps(made, request, engine.Implementation("native", "cpu", "float16", "tested")))
    return Noting.noted


def test_a_captured_prompt_is_launched_after_one_copy(monkeypatch):
    """The GPU is idle until then: an operation of torch takes the host 5 to 20 microseconds."""

    def compute(self, reader, layers):
        Noting.noted.append("launch")
        self.stream = torch.zeros(1, 64, 64, dtype=torch.float16)

    monkeypatch.setattr(captured_prompt.CapturedPrompt, "_compute", compute)
    noted = operations_of_a_prompt(monkeypatch)
    # prompts become a tensor, are padded on the host, and are copied to the device
    assert noted[: noted.index("launch")] == ["stack", "constant_pad_nd", "copy_"]


def test_a_long_prompt_has_matmuls_before_its_positions(monkeypatch):
    """While the GPU is busy with them, the host computes positions and allocates the cache."""
    monkeypatch.setattr(prompt, "CAPTURED", 0)
    noted = operations_of_a_prompt(monkeypatch)
    assert noted[: noted.index("normalize")] == ["stack", "embedding"]
    slow = ["normalize", "matmul", "context", "allocate", "prepare_heads"]
    before = [name for name in noted[: noted.index("prepare_heads") + 1] if name in slow]
    assert before == ["normalize", "matmul", "matmul", "matmul", "context", "allocate", "prepare_heads"]


@pytest.mark.parametrize("chunk", [T, 3])
def test_what_is_not_filled_of_a_cache_is_zero(chunk, monkeypatch):
    _, half = models(config(), torch.float16)
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: torch.full(shape, float("nan"), **options))
    reader, cache = reader_of(half), half.new_cache("static", capacity=SLOTS)
    ids = torch.randint(0, V, (2, T), generator=torch.Generator().manual_seed(3))
    for first in range(0, T, chunk):
        reader(ids[:, first : first + chunk], None, cache)
    for store in cache.layers:
        for held in (store.k, store.v):
            assert not held[:, :, T:].any()
            assert held[:, :, :T].any(-1).all()
            assert not held.isnan().any()


def test_a_long_prompt_is_worth_kernels_that_read_it(monkeypatch):
    monkeypatch.delenv("GLASSFORMER_NATIVE", raising=False)
    call = engine.Call(config(), torch.bfloat16, torch.device("cuda"), max_new_tokens=1, precision="bfloat16")
    long = dataclasses.replace(call, prompt_tokens=engine.LONG_PROMPT)
    for kernel in DECODE_KERNELS:
        assert "32 new tokens" in (engine._not_worth_it(call, kernel) or "")
        found = engine._not_worth_it(long, kernel) or ""
        assert ("32 new tokens" in found) == (kernel.device == "cpu"), kernel.name
