"""One product of a packed matrix with a few vectors, within the rounding that its precision allows and no more."""

import ctypes
import hashlib
import platform
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glassformer.kernels.cpu.decode import library
from glassformer.kernels.cpu.decode.pack import Store, address, group_of, matrix, packed_as, quantise, room
from glassformer.kernels.toolchain import cxx
from glassformer.model.device import processor_flags

WIDE = "avx512f" in processor_flags()
pytestmark = pytest.mark.skipif(cxx.compiler() is None, reason="no C++ compiler here")


def product(weight, bias, x, precision, threads=2, kernels=None):
    store = Store(room([weight], precision))
    packed = matrix(store, weight, bias, precision)
    y = torch.empty(len(x), len(weight))
    (kernels or library.load()).glass_multiply(ctypes.byref(packed), address(x), len(x), threads, address(y))
    return y


def rounded(weight, precision):
    """The matrix that the kernel stands for."""
    kind = packed_as(weight.shape[1], precision)
    if kind in ("float32", "bfloat16"):
        return weight.to(getattr(torch, kind)).double()
    whole, scales = quantise(weight, group_of(weight.shape[1], kind), kind)
    return (whole.double().unflatten(1, (scales.shape[1], -1)) * scales[..., None].double()).flatten(1)


@given(
    rows=st.sampled_from([1, 2, 5, 9, 31, 32, 70]),
    columns=st.sampled_from([1, 15, 16, 33, 64, 80, 96, 128, 192, 256, 320, 384]),
    batch=st.sampled_from([1, 2, 3, 4, 5, 8, 9, 13, 16, 30, 48, 67]),
    precision=st.sampled_from(["float32", "bfloat16", "int8", "int4"]),
    biased=st.booleans(),
    seed=st.integers(0, 999),
)
def test_a_product_is_exact_to_the_rounding_of_its_sums(rows, columns, batch, precision, biased, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    x = torch.randn(batch, columns, generator=generator) * torch.tensor([1.0, 30.0])[torch.arange(columns) % 2]
    bias = torch.randn(rows, generator=generator) if biased else None
    exact, size = rounded(weight, precision), rounded(weight, precision).abs()
    wanted = x.double() @ exact.T + (0 if bias is None else bias.double())
    # float32 sums: every product and at most one addition per column, one after the other
    bound = x.abs().double() @ size.T * 2**-24 * (4 + columns) + 1e-6
    largest = x.abs().amax(1, keepdim=True).double()
    if packed_as(columns, precision) in ("int8", "int4"):  # half a step of the activations: 16 bits, of many and int4 8
        bound += largest / (2 * (32512 if batch < 16 and precision == "int8" else 127)) * size.sum(1)
    elif batch >= 16 and precision != "float32":  # of many, where the processor has products of bfloat16
        bound += x.abs().double() @ size.T * 2**-8
    assert ((product(weight, bias, x, precision).double() - wanted).abs() <= bound).all()


@pytest.mark.parametrize(("precision", "most"), [("int8", 32512.0), ("int4", 127.0)])
def test_whole_numbers_are_multiplied_exactly(precision, most):
    """Activations that 16 bits (with int4 weights 8) hold: every bit of the result is right, the extremes included."""
    weight = torch.full((3, 256), 7.0 if precision == "int4" else 127.0)
    weight[1] *= -1
    weight[2, ::2] *= -1
    x = torch.full((1, 256), most)
    x[0, 1::3] = -most
    x[0, 2::3] = 1.0
    assert torch.equal(product(weight, None, x, precision).double(), x.double() @ weight.double().T)


def whole_numbers(largest, batch):
    """A matrix and vectors whose scales are 1: random, and in the first two rows of each nothing but extremes.

    The largest of a vector is 127, and the largest sum of four that AVX2 adds in 16 bits 253.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-largest, largest + 1, (70, 384), generator=generator).float()
    weight[:, ::32] = largest
    x = torch.randint(-63, 64, (batch, 384), generator=generator).float()
    most = torch.tensor([127.0, 63, 63, 63, 63, 0, 63, 64]).repeat(48)
    x.view(batch, 6, 64)[..., :8] = -most[:8]
    for extremes, limit in ((weight, largest), (x, most)):
        extremes[0], extremes[1] = limit, -limit
    return weight, x


@pytest.mark.parametrize("precision", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("batch", [16, 37, 60])
def test_many_vectors_of_small_whole_numbers_are_multiplied_exactly(precision, batch):
    """What bfloat16 (up to 256) and bytes (up to 127) hold must come out to the last bit of float32."""
    weight, x = whole_numbers({"bfloat16": 100, "int8": 127, "int4": 7}[precision], batch)
    assert torch.equal(product(weight, None, x, precision), x @ weight.T)


def test_each_group_of_columns_of_a_prompt_has_a_scale_of_its_own():
    """An outlier in one group costs the others nothing: with one scale per token the small ones would be lost."""
    weight = torch.zeros(32, 512)
    weight[:, :256] = 1.0
    x = torch.full((20, 512), 1e-3)
    x[:, 511] = 1000.0
    assert torch.allclose(product(weight, None, x, "int8"), torch.full((20, 32), 0.256), rtol=1e-5)


def test_a_vector_of_zeros_gives_the_bias():
    weight, bias = torch.randn(5, 128), torch.randn(5)
    for precision in ("float32", "bfloat16", "int8", "int4"):
        for batch in (2, 20):
            assert torch.equal(product(weight, bias, torch.zeros(batch, 128), precision), bias.expand(batch, 5))


def built(*flags):
    """The kernels, compiled otherwise than for this processor: once, also for later runs of the tests."""
    other = ctypes.CDLL(str(cxx.build(library.SOURCE, (*flags, "-w"))))
    other.glass_multiply.argtypes = library.load().glass_multiply.argtypes
    return other


def test_a_prompt_meets_the_matrix_unit_in_whole_tiles():
    """The unit played by loops: 32 vectors and 32 rows at a time, rows and vectors that are missing, widths it cannot
    take. Vectors are rounded to bfloat16 once, sums are float32's."""
    header = Path(__file__).parent / "emulated_amx.h"
    content = hashlib.sha256(header.read_bytes()).hexdigest()  # the cache looks at flags and not into this file
    other = built(*library.FLAGS, "-O1", "-include", str(header), f"-DEMULATED_AMX={content}")
    for rows, columns, batch in ((70, 96, 48), (32, 32, 67), (5, 800, 100), (40, 80, 50)):
        weight, bias, x = torch.randn(rows, columns), torch.randn(rows), torch.randn(batch, columns)
        narrow, exact = x.bfloat16().double(), rounded(weight, "bfloat16")
        takes = columns % 32 == 0
        wanted = (narrow if takes else x.double()) @ exact.T + bias.double()
        bound = x.abs().double() @ exact.abs().T * (2**-24 * (4 + columns) + (0 if takes else 2**-8)) + 1e-6
        found = product(weight, bias, x, "bfloat16", kernels=other).double()
        assert ((found - wanted).abs() <= bound).all(), (rows, columns, batch)


@pytest.mark.skipif("avx2" not in processor_flags(), reason="this processor has no AVX2")
def test_without_avx512_bytes_are_multiplied_exactly():
    """From 48 vectors on, the signs of activations flip the weights, so that sums of four products fit 16 bits."""
    other = built(*library.FLAGS, "-march=x86-64-v3", "-O1")
    for batch in (48, 61):
        weight, x = whole_numbers(127, batch)
        assert torch.equal(product(weight, None, x, "int8", kernels=other), x @ weight.T)
    for batch in (4, 8):  # activations have 16 bits, of which 127 is no whole multiple
        found = product(weight, None, x[:batch], "int8", kernels=other)
        assert torch.allclose(found, x[:batch] @ weight.T, rtol=1e-4, atol=1)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of one family")
@pytest.mark.parametrize(
    "processor",
    [
        "x86-64",
        "x86-64-v3",
        pytest.param("x86-64-v4", marks=pytest.mark.skipif(not WIDE, reason="this processor has no AVX-512")),
    ],
)
def test_other_processors_get_the_same_whole_numbers_and_close_sums(processor):
    """Built for an older processor, the lane-by-lane code runs; v4 has wide vectors but no byte products."""
    flags = [f"-march={processor}" if flag == "-march=native" else flag for flag in library.FLAGS]
    other = built(*flags)
    weight, x = torch.randn(40, 384), torch.randn(20, 384)
    for precision in ("float32", "bfloat16", "int8", "int4"):
        found, wanted = product(weight, None, x[:9], precision, kernels=other), product(weight, None, x[:9], precision)
        near = (
            1e-4
            if precision != "int4"
            else float(x.abs().max()) / 254 * float(rounded(weight, "int4").abs().sum(1).max())
        )
        assert torch.allclose(found, wanted, rtol=1e-5, atol=near), precision  # here int4 has activations of 8 bits
        many = product(weight, None, x, precision, kernels=other)  # as few vectors do, where there is nothing faster
        size = rounded(weight, precision)
        bound = 1e-3 + float(x.abs().max()) / (2 * 32512) * size.abs().sum(1) * (precision in ("int8", "int4"))
        assert ((many.double() - x.double() @ size.T).abs() <= bound).all(), precision
