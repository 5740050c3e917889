"""The CUDA kernels of 8-bit products are their definitions: compiled for the CPU here, on a GPU as they are."""

import ctypes
import re
from pathlib import Path

import pytest
import torch

from glassformer.kernels.cuda.training import fp8, fp8_cuda, loss
from glassformer.kernels.toolchain import nvrtc
from glassformer.model.layers import ACTIVATIONS
from tests.emulated_cuda import built, needs_compiler

CHOICES = ("WIDE", "SHORT", "KIND", "SUMMED")  # not DOWN: arrays are as long
CHOOSE = 'static int chosen[4];\nextern "C" void choose(const int* c) { memcpy(chosen, c, sizeof(chosen)); }\n'
UNIT = torch.tensor(2.0**-2)


class Emulated:
    """In place of nvrtc.Kernel. What macros choose is a variable here, so that a text is compiled once for all."""

    def __init__(self, text: str, name: str):
        values = [0] * len(CHOICES)
        for n, choice in enumerate(CHOICES):
            values[n] = int(next(iter(re.findall(rf"^#define {choice} (\d+)$", text, re.M)), 0))
            text = re.sub(rf"^#define {choice} \d+$", f"#define {choice} chosen[{n}]", text, flags=re.M)
        self.library, self.values = built(CHOOSE + text, name, Path(__file__).parent), values

    def launch(self, given: ctypes.Structure, blocks: int, threads: int) -> None:
        assert self.library.size() == ctypes.sizeof(given)
        self.library.choose((ctypes.c_int * len(self.values))(*self.values))
        self.library.run(ctypes.byref(given), blocks, threads)


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setattr(nvrtc, "kernel", lambda text, name, device, shared=0: Emulated(text, name))
    monkeypatch.setattr(loss, "THREADS", 64)
    monkeypatch.setattr(torch, "empty", _poisoned)


def _poisoned(*shape, dtype=torch.float32, device=None):
    """Memory that was never written to: what a kernel leaves out shows."""
    shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    size = torch.zeros((), dtype=dtype).element_size()
    return torch.full((*shape[:-1], shape[-1] * size), 0x7F, dtype=torch.uint8).view(dtype)


def steps_apart(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How many representable numbers lie between; NaN only equals NaN."""
    codes = [t.view(torch.uint8).short() for t in (a, b)]
    signed = [torch.where(c < 128, c, 128 - c) for c in codes]
    nan = [t.float().isnan() for t in (a, b)]
    return torch.where(nan[0] | nan[1], 1000 * (nan[0] != nan[1]), (signed[0] - signed[1]).abs())


def compare(operator: str, *given, exactly: bool = False) -> None:
    """To the bit; or, where an exponential is taken, with one number in a hundred the neighbouring one."""
    found, wanted = getattr(fp8_cuda, operator)(*given), getattr(fp8, operator)(*given)
    found, wanted = (t if isinstance(t, tuple) else (t,) for t in (found, wanted))
    held = [t.untyped_storage().data_ptr() for t in found if t.numel()]
    assert len(set(held)) == len(held)  # what an operator returns may not share memory
    for a, b in zip(found, wanted, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.is_contiguous()
        if a.dtype in fp8.LARGEST:
            steps = steps_apart(a, b)
            assert int(steps.max()) <= (0 if exactly else 1)
            assert float((steps > 0).float().mean()) < 0.01
        elif a.numel():
            assert float((a - b).abs().max() / b.abs().max()) < 1e-5


def matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers over some binades, with what saturates, vanishes or is not finite among them."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-14, 4, (rows, columns), generator=generator)
    x = torch.randn(rows, columns, generator=generator) * torch.exp2(powers)
    x.view(-1)[:8] = torch.tensor([0.0, -0.0, 1e9, -1e9, float("nan"), float("inf"), -float("inf"), 1e-30])
    x[-1, -3:] = torch.tensor([float("inf"), 3e38, float("nan")])
    return x


@pytest.mark.sample(3)
@needs_compiler
@pytest.mark.parametrize("dtype", fp8.LARGEST)
@pytest.mark.parametrize("shape", [(144, 80), (16, 16), (128, 64), (32, 144)])
def test_casts_equal_their_definition_to_the_bit(shape, dtype, emulated):
    for x in (matrix(*shape), matrix(*shape).bfloat16(), matrix(*shape[::-1]).T):
        compare("cast_all", [x], UNIT, dtype, False, None, exactly=True)
    compare("cast_all", [matrix(*shape)], torch.tensor(torch.nan), dtype, False, None, exactly=True)


@needs_compiler
def test_several_matrices_are_cast_into_one_as_defined(emulated):
    parts = [matrix(144, 80).bfloat16(), matrix(144, 16, seed=1).bfloat16(), matrix(144, 64, seed=2)]
    compare("cast_all", parts, UNIT, fp8.E5M2, True, None, exactly=True)
    compare("cast_all", [x.T for x in parts], UNIT, fp8.E4M3, False, None, exactly=True)
    # the last one may end anywhere
    compare("cast_all", [matrix(16, 80), matrix(133, 80, seed=1)], UNIT, fp8.E4M3, False, 192, exactly=True)


@pytest.mark.sample(1)
@needs_compiler
@pytest.mark.parametrize("down", [128, 256])
def test_tiles_of_twice_the_rows_give_the_same(emulated, monkeypatch, down):
    monkeypatch.setattr(fp8_cuda, "DOWN", down)
    monkeypatch.setattr(fp8_cuda, "TRANSPOSE_DOWN", down)
    compare("cast_all", [matrix(400, 80)], UNIT, fp8.E4M3, False, None, exactly=True)
    x = torch.randint(0, 256, (272, 144), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(fp8_cuda.transpose(x), x.T)


@needs_compiler
def test_every_number_that_8_bits_hold_and_every_middle_is_rounded_as_defined(emulated):
    for dtype in fp8.LARGEST:
        numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
        numbers = numbers[numbers.isfinite()].sort().values
        middles = (numbers[1:] + numbers[:-1]) / 2
        close = [middles, middles.nextafter(torch.tensor(torch.inf)), middles.nextafter(-torch.tensor(torch.inf))]
        x = torch.cat([numbers, *close])
        x = torch.cat([x, x.new_zeros(-len(x) % 256)]).view(-1, 16)
        compare("cast_all", [x * UNIT], UNIT, dtype, False, None, exactly=True)


@needs_compiler
@pytest.mark.parametrize(
    "kind", [k if k == "gelu_tanh" else pytest.param(k, marks=pytest.mark.slow) for k in fp8_cuda.KINDS]
)
def test_activations_and_their_gradients_equal_their_definitions(kind, emulated):
    exactly = kind.startswith("relu")
    pre, d_post = matrix(144, 80).bfloat16(), matrix(144, 80, seed=1).bfloat16()
    d_post[0] = 1.0
    compare("activate", pre, UNIT, kind, exactly=exactly)
    compare("activate_backward", d_post, pre, UNIT, 2 * UNIT, kind, False, exactly=exactly)
    # sums of what is not finite, or is very large, cannot be compared
    tame = [torch.where(t.isfinite() & (t.abs() < 1e3), t, 0.5) for t in (d_post, pre)]
    compare("activate_backward", *tame, UNIT, 2 * UNIT, kind, True, exactly=exactly)


@needs_compiler
def test_mean_squares_of_several_equal_their_definition(emulated, monkeypatch):
    monkeypatch.setattr(fp8_cuda, "PARTS", 3)
    # in float32 more than three blocks' threads ask for at once
    x, bias = torch.randn(3, 176, 80, generator=torch.Generator().manual_seed(0)), torch.arange(16.0)
    given = [x[0].bfloat16(), 1e-3 * x[1].T, bias, 7 * x[2, :16].bfloat16()]

    def compare_sums(given, sampled):
        found, wanted = fp8_cuda.square_parts(given, sampled), fp8.mean_squares(given, sampled)
        assert found.shape == (len(given), 3)
        assert torch.allclose(found.sum(1), wanted, rtol=1e-5)

    compare_sums(given, False)
    compare_sums(given[1:2], False)
    monkeypatch.setattr(fp8_cuda, "SAMPLED_FROM", 4096)
    compare_sums(given, True)
    bias[3] = torch.inf
    assert fp8_cuda.square_parts(given, True).sum(1).isfinite().tolist() == [True, True, False, True]


@needs_compiler
@pytest.mark.parametrize("shape", [(144, 272), (16, 16), (128, 128)])
def test_bytes_are_turned_as_they_are(shape, emulated):
    x = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(fp8_cuda.transpose(x), x.T)


def rows_of_logits() -> tuple[torch.Tensor, torch.Tensor]:
    logits = 4 * torch.randn(16, 208, generator=torch.Generator().manual_seed(3)).bfloat16()
    targets = torch.arange(16) * 13
    targets[[3, 9]] = -100
    return logits, targets


@pytest.mark.sample(1)
@needs_compiler
@pytest.mark.parametrize(("smoothing", "z_loss", "columns"), [(0.0, 0.0, 208), (0.1, 0.01, 208), (0.1, 0.01, 197)])
def test_the_losss_gradient_equals_its_definition(smoothing, z_loss, columns, emulated):
    compare("loss_gradients", *rows_of_logits(), -100, smoothing, z_loss, columns)


@needs_compiler
def test_rows_of_the_loss_that_are_not_finite_stay_so(emulated):
    logits, targets = rows_of_logits()
    logits[0, 5], logits[1, 5], logits[2, 5] = torch.nan, torch.inf, 80.0
    _, _, gradient, transposed = fp8_cuda.loss_gradients(logits, targets, -100, 0.0, 0.0, 208)
    assert gradient.float().isnan().any(1).tolist() == [True, True, False] + [False] * 13
    assert gradient.float()[2, 5] == 2**14
    assert torch.equal(gradient.view(torch.uint8).T, transposed.view(torch.uint8))


@needs_compiler
def test_a_gradient_of_the_loss_beyond_all_numbers_does_not_pass_for_a_large_one(emulated):
    logits, targets = rows_of_logits()
    logits[0] = 1e38
    _, _, gradient, _ = fp8_cuda.loss_gradients(logits, targets, -100, 0.0, 0.01, 208)
    assert gradient.float().isnan().all(1).tolist() == [True] + [False] * 15


def test_constants_are_the_definitions():
    assert set(fp8_cuda.KINDS) <= set(ACTIVATIONS)
    text = fp8_cuda.source()
    assert f"#define THREADS {fp8_cuda.THREADS}\n" in (Path(fp8_cuda.__file__).parent / "squares.cu").read_text()
    for name in ("DOWN", "ACROSS", "RUN"):
        assert f"#define {name} {getattr(fp8_cuda, name)} " in text.replace("\n", " ")


def test_sizes_the_kernels_cannot_take_are_not_taken():
    with pytest.raises(AssertionError):
        fp8_cuda.tiles(torch.Size((24, 16)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_kernels_on_a_gpu_equal_their_definitions_on_the_cpu():
    from glassformer.bench.gpu.cuda_kernels import float8_kernels_equal_their_definitions

    assert all(finding.passed for finding in float8_kernels_equal_their_definitions())
