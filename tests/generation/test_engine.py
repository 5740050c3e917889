"""Which implementation is chosen: by the call and the machine alone, with a reason; what cannot be is a sentence."""

import sys
from dataclasses import replace

import pytest
import torch

import glassformer as gf
from glassformer import config as c
from glassformer.config import presets
from glassformer.generation import Sampling, generate, stream
from glassformer.generation.engine import WORTH_COMPILING, Call, choose_engine, in_precision, make_state
from glassformer.generation.request import GenerationRequest
from glassformer.model import build
from tests.variants import POSITIONS, decoder, seq2seq

library = pytest.importorskip("glassformer.kernels.cpu.decode.library")
from glassformer.kernels import decode  # noqa: E402
from glassformer.kernels.cpu.decode.stack import weights_of  # noqa: E402
from glassformer.kernels.toolchain import nvrtc  # noqa: E402

NANO = presets.nano(max_len=64)
CUDA = torch.device("cuda")
LONG = Call(NANO, torch.float32, torch.device("cpu"), "static", WORTH_COMPILING)


def small(d_model: int = 40):
    """A config that the CUDA kernels support."""
    return decoder(position=POSITIONS["learned"], d_model=d_model, attention__d_head=16, feedforward=c.Dense(136))


needs_compiler = pytest.mark.skipif(library.cxx.compiler() is None, reason="no C++ compiler here")


@pytest.fixture
def able(monkeypatch):
    """A machine with all compilers, with the kernels switched on."""
    monkeypatch.delenv("GLASSFORMER_NATIVE")
    monkeypatch.setattr(library.cxx, "compiler", lambda: "c++")
    monkeypatch.setattr(nvrtc, "is_available", lambda: True)
    return monkeypatch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_stored_dtype_gets_the_kernels_and_they_compute_in_float32(able, dtype):
    found = choose_engine(replace(LONG, dtype=dtype))
    assert (found.engine, found.device, found.precision) == ("native", "cpu", "float32")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_new_tokens": WORTH_COMPILING - 1}, "fewer than 32 new tokens"),
        ({"cache": None}, "a cache of their own kind, not 'none'"),
        ({"cache": "windowed"}, "a cache of their own kind, not 'windowed'"),
        ({"dtype": torch.float64}, "float64"),
        ({"config": c.replace(NANO, embedding__width=32, head__tied=False)}, "embedding.width=32"),
        ({"device": torch.device("meta")}, "the model is on meta"),
        ({"device": CUDA, "config": small(), "has_draft": True}, "a draft"),
        ({"device": CUDA, "config": small(), "cache": "windowed"}, "a static cache, not 'windowed'"),
    ],
)
def test_auto_falls_back_to_torch_with_a_reason(able, changes, words):
    call = replace(LONG, **changes)
    found = choose_engine(call)
    assert found.engine == "torch"
    assert words in found.why
    if "max_new_tokens" not in changes:
        with pytest.raises(ValueError, match=words):
            choose_engine(call, "native")


def kernel_of(call: Call) -> str:
    kernel = choose_engine(call).kernel
    assert kernel is not None
    return kernel.name


def test_every_model_has_a_fast_path_on_a_gpu(able):
    """Small models have kernels of their own, every other model a captured graph."""
    on_gpu = replace(LONG, device=CUDA)
    able.setattr(torch.cuda, "is_available", lambda: True)
    able.setattr("glassformer.kernels.cuda.decode.decoder.unsupported_device", lambda *_: None)
    able.setattr("glassformer.kernels.decode.unsupported_device", lambda *_: None)
    assert kernel_of(replace(on_gpu, config=small())) == "cuda-persistent"
    assert kernel_of(replace(on_gpu, config=small(), sequences=3, precision="float32")) == "cuda-batch"
    for sequences, kernel in ((16, "cuda-graph"), (17, "cuda-batch")):  # few ones of 16 bits are faster in a graph
        call = replace(on_gpu, config=small(64), sequences=sequences)
        assert kernel_of(replace(call, dtype=torch.bfloat16, precision="bfloat16")) == kernel
    assert kernel_of(replace(on_gpu, config=small(), beams=2)) == "cuda-graph"
    assert kernel_of(replace(on_gpu, config=small(), dtype=torch.float64)) == "cuda-graph"
    for config in (presets.moe_tiny(), seq2seq(), presets.qwen3_0_6b(), presets.deepseek_v3(), presets.gpt2_medium()):
        assert kernel_of(replace(on_gpu, config=config, dtype=torch.bfloat16)) == "cuda-graph"


def test_without_a_compiler_or_switched_off_auto_is_torch_and_says_so(able):
    able.setattr(library.cxx, "compiler", lambda: None)
    assert choose_engine(LONG).text() == "torch on cpu in float32 (no C++ compiler was found (c++, g++ or clang++))"
    able.setattr(library.cxx, "compiler", lambda: "c++")
    able.setattr(nvrtc, "is_available", lambda: False)
    assert kernel_of(replace(LONG, config=small(), device=CUDA)) == "cuda-graph"  # torch's kernels need no compiler
    able.setenv("GLASSFORMER_NATIVE", "0")
    assert choose_engine(LONG).why == "GLASSFORMER_NATIVE=0 is set"


def test_the_choice_does_not_depend_on_what_was_compiled_before(able):
    """Nor does choosing compile anything."""
    able.setattr(library.cxx, "library_path", lambda *_: pytest.fail("looked for a compiled library"))
    able.setattr(library.cxx, "build", lambda *_: pytest.fail("compiled"))
    assert choose_engine(LONG).engine == "native"
    able.setattr(nvrtc, "code_path", lambda *_: pytest.fail("looked for compiled code"))
    assert choose_engine(replace(LONG, config=small(), device=CUDA)).engine == "native"


def test_precisions_of_torch(able):
    half = replace(LONG, dtype=torch.float16)
    assert choose_engine(half, "torch").precision == "float32"
    assert choose_engine(half, "torch", "bfloat16").precision == "bfloat16"
    assert choose_engine(half, "auto", "float16").engine == "torch"
    assert choose_engine(replace(LONG, dtype=torch.float64)).precision == "float64"
    on_gpu = replace(half, device=CUDA, config=small())
    assert choose_engine(on_gpu, "torch").precision == "float16"
    assert choose_engine(on_gpu).to_dict() | {"why": ""} == {
        "engine": "native", "device": "cuda", "precision": "float16", "why": ""
    }  # fmt: skip
    assert choose_engine(replace(on_gpu, dtype=torch.bfloat16)).precision == "bfloat16"


REFUSED = {
    "an unknown engine": ({"engine": "numba"}, "'auto', 'torch' or 'native'"),
    "an unknown precision": ({"precision": "int3"}, "'float32', 'bfloat16', 'float16', 'int8'"),
    "torch with int8": ({"engine": "torch", "precision": "int8"}, "needs the compiled kernels"),
    "no cache": ({"engine": "native", "cache": False}, "a cache of their own"),
    "int8 without a cache": ({"precision": "int8", "cache": False}, "a cache of their own.*needs the compiled"),
    "native in float16": ({"engine": "native", "precision": "float16"}, "no float16"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_a_sentence(case):
    settings, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        generate(build(NANO), [[1, 2]], 3, **settings)


def test_weights_in_8_bits_on_a_gpu(monkeypatch):
    monkeypatch.setattr(decode, "unsupported_device", lambda device: None)
    llama = replace(LONG, config=presets.llama3_8b(), device=CUDA, dtype=torch.bfloat16)
    for precision in ("int8", "fp8"):
        found = choose_engine(llama, "auto", precision)
        assert (found.engine, found.precision) == ("native", precision)
        with pytest.raises(ValueError, match="up to 64 sequences"):
            choose_engine(replace(llama, sequences=65), "auto", precision)
        with pytest.raises(ValueError, match="d_model=40 is not a multiple of 64"):
            choose_engine(replace(llama, config=small()), "auto", precision)
    with pytest.raises(ValueError, match="is for CPUs"):
        choose_engine(llama, "auto", "int4")
    with pytest.raises(ValueError, match="no fp8"):
        choose_engine(LONG, "auto", "fp8")


def test_kernels_that_cannot_be_compiled_are_replaced_by_torch_or_refused(monkeypatch, tmp_path):
    monkeypatch.delenv("GLASSFORMER_NATIVE")
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path))
    library.load.cache_clear()
    monkeypatch.setattr(library.cxx, "compiler", lambda: "/bin/false")
    try:
        model = build(NANO)
        found = generate(model, [[1, 2]], 32)
        assert found.engine.engine == "torch"
        assert "could not be compiled: /bin/false could not compile decode.cpp" in found.engine.why
        assert generate(model, [[1, 2]], 32, draft="lookup").engine.engine == "torch"
        for given in ({"engine": "native"}, {"precision": "int8"}):
            with pytest.raises(ValueError, match="/bin/false could not compile"):
                generate(model, [[1, 2]], 32, **given)
    finally:
        library.load.cache_clear()


@pytest.mark.sample(1)
@needs_compiler
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_bard_says_the_same_in_both_engines(monkeypatch, dtype):
    monkeypatch.delenv("GLASSFORMER_NATIVE")
    model = gf.load("bard", dtype=dtype)
    for sampling in (None, Sampling(0.8, 50, 0.95)):
        slow, fast = (generate(model, "ROMEO:", 100, sampling, engine=name) for name in ("torch", "auto"))
        assert slow == fast
        assert (slow.engine.engine, fast.engine.engine) == ("torch", "native")
        assert slow.engine.precision == fast.engine.precision == "float32"
    assert next(model.parameters()).dtype is getattr(torch, dtype)
    assert stream(model, "ROMEO:", 40).engine == fast.engine


@needs_compiler
def test_changed_half_precision_weights_are_seen(monkeypatch):
    """The kernels read a float32 copy of them, which must follow."""
    model = gf.load("bard")
    before = generate(model, "ROMEO:", 8, engine="native")
    with torch.no_grad():
        model.decoder.norm.weight.data.mul_(-1)
    after = generate(model, "ROMEO:", 8, engine="native")
    assert after != before
    assert after == generate(model, "ROMEO:", 8, engine="torch")


@needs_compiler
def test_half_precision_weights_are_converted_once():
    model = gf.load("bard")
    first = weights_of(model, "float32")
    assert weights_of(model, "float32") is first
    assert first.model.tokens == first.model.head.weights  # a tied head is not converted a second time
    wide = gf.load("bard", dtype="float32")
    assert weights_of(wide, "float32") is not weights_of(wide, "float32")  # read in place: there is nothing to keep


def test_torch_computes_in_the_precision_that_is_reported():
    half = gf.load("bard")
    for precision, dtype in (("auto", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        request = GenerationRequest([[1, 2, 3]], 4, engine="torch", precision=precision)
        state, chosen = make_state(half, request)
        assert chosen.precision == str(dtype).removeprefix("torch.")
        with torch.no_grad():
            assert state.start().dtype is dtype
    assert in_precision(half, torch.float16) is half
    assert next(half.parameters()).dtype is torch.float16


def test_without_the_kernels_package_torch_decodes(monkeypatch):
    monkeypatch.delenv("GLASSFORMER_NATIVE")
    monkeypatch.setitem(sys.modules, "glassformer.kernels.decode", None)
    assert choose_engine(LONG).text() == "torch on cpu in float32 (the compiled kernels are not installed)"
    assert generate(build(NANO), [[1, 2]], 40, draft="lookup").engine.engine == "torch"
    for settings in ({"engine": "native"}, {"precision": "int8"}):
        with pytest.raises(ValueError, match="the compiled kernels are not installed"):
            generate(build(NANO), [[1, 2]], 40, **settings)
