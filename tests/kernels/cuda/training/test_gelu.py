"""Products with GELU and its slope: their definition against autograd, the CUDA kernels on a CPU against that."""

import ctypes
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from glassformer import config as c
from glassformer.kernels.cuda.training import gelu, hopper, products, tiles
from glassformer.model.feedforward import build_dense
from glassformer.model.tap import NO_TAP
from tests.emulated_cuda import built, needs_compiler
from tests.kernels.cuda.training.test_exponentials import OnGpu, emulated_map

BF = torch.bfloat16


def numbers(*shape, seed=0, dtype=BF, size=1.0):
    return (size * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


@pytest.mark.parametrize("biased", [False, True])
def test_the_definition_is_gelu_and_its_gradient(biased):
    x, weight, dy = (numbers(*shape, dtype=torch.float64, seed=i) for i, shape in enumerate(((7, 5), (9, 5), (7, 4))))
    bias, down = numbers(9, dtype=torch.float64) if biased else None, numbers(4, 9, dtype=torch.float64)
    z = F.linear(x, weight, bias).requires_grad_()
    wanted = F.gelu(z, approximate="tanh")
    post, slope = gelu.gelu_product(x, weight, bias)
    assert torch.allclose(post, wanted, rtol=1e-12)
    (gradient,) = torch.autograd.grad(F.linear(wanted, down), z, dy)
    assert torch.allclose(gelu.slope_product(dy, down.T.contiguous(), slope), gradient, rtol=1e-10)


def test_operators_keep_torchs_rules():
    x, weight, bias, slope = numbers(8, 16), numbers(24, 16), numbers(24), numbers(8, 24)
    torch.library.opcheck(gelu.gelu_product, (x, weight, bias))
    torch.library.opcheck(gelu.slope_product, (x, weight, slope))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("kernels")


@cache
def library(text, folder):
    mine = folder / str(abs(hash(text)))
    mine.mkdir(exist_ok=True)
    return built(text, "gelu_product", mine, Path(__file__).parent, "slope_product")


def run(kernel, left, right, slope, folder, clusters, bias=None):
    """Its result; gelu_product also fills `slope`."""
    out = torch.full((len(left), len(right)), float("nan"), dtype=BF)
    given = gelu.Given(
        **{name: emulated_map(*of) for name, of in gelu.matrices(left, right, out, slope).items()},
        bias=None if bias is None else bias.data_ptr(),
        rows=len(left),
        columns=len(right),
    )
    made = library(gelu.source(left.shape[1], bias is not None), folder)
    assert made.size() == ctypes.sizeof(gelu.Given)
    launch = made.run if kernel == "gelu_product" else made.run_slope_product
    launch(ctypes.byref(given), clusters * tiles.CLUSTER, tiles.THREADS)
    return out


def check(rows, columns, depth, biased, folder, clusters):
    x, weight = numbers(rows, depth), numbers(columns, depth, seed=1, size=depth**-0.5)
    bias = numbers(columns, seed=2) if biased else None
    slope = torch.full((rows, columns), float("nan"), dtype=BF)
    post = run("gelu_product", x, weight, slope, folder, clusters, bias)
    dy, down = numbers(rows, depth, seed=3), numbers(columns, depth, seed=4)
    d = run("slope_product", dy, down, slope, folder, clusters)
    # the same numbers but for the order of float32 sums: now and then one is rounded the other way
    for found, wanted in zip(
        (post, slope, d), (*gelu.gelu_product(x, weight, bias), gelu.slope_product(dy, down, slope)), strict=True
    ):
        assert torch.allclose(found.float(), wanted.float(), rtol=2**-7, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize(
    ("rows", "columns", "depth", "biased", "sizes", "clusters"),
    [
        (300, 392, 72, True, (3, 2, 2), 2),  # nothing fills its tiles; both groups take several turns
        (256, 128, 200, False, (2, 1, 8), 1),  # a tile for each group, of twice as many steps as the ring holds
        pytest.param(513, 704, 320, True, (5, 2, 3), 1, marks=pytest.mark.slow),
    ],
)
def test_the_kernels_are_the_definition(rows, columns, depth, biased, sizes, clusters, small, folder):
    small(*sizes)
    check(rows, columns, depth, biased, folder, clusters)


@needs_compiler
@pytest.mark.parametrize("lazy", [0, 5, 10])
def test_warps_need_not_keep_step(lazy, small, folder, monkeypatch):
    monkeypatch.setenv("EMULATED_ORDER", str(lazy))
    small(3, 2, 2)
    check(300, 392, 72, False, folder, 1)


@needs_compiler
def test_far_from_zero_it_is_the_number_or_nothing(small, folder):
    small(2, 1, 8)
    x, weight = torch.zeros(128, 8, dtype=BF), torch.ones(128, 8, dtype=BF)
    far = [-300.0, -20.0, -3.0, 0.0, 3.0, 20.0, 300.0, float("nan")]
    x[:8, 0] = torch.tensor(far)
    slope = torch.full((128, 128), float("nan"), dtype=BF)
    post = run("gelu_product", x, weight, slope, folder, 1)
    wanted_post, wanted_slope = gelu.gelu_product(x, weight, None)
    assert torch.allclose(post.float(), wanted_post.float(), rtol=2**-7, atol=1e-5, equal_nan=True)
    assert torch.allclose(slope.float(), wanted_slope.float(), rtol=2**-7, atol=1e-5, equal_nan=True)
    assert post[7].isnan().all()


@pytest.mark.parametrize("biased", [False, True])
def test_a_feed_forward_trains_through_it(biased, monkeypatch):
    monkeypatch.setattr(products, "_suited", lambda *given: True)
    found = []
    for with_slope in (True, False):
        monkeypatch.setattr(gelu, "suits", lambda *given, used=with_slope: used)
        torch.manual_seed(0)
        layer = build_dense(16, c.Dense(32, activation="gelu_tanh", bias=biased)).train()
        layer.__class__ = products.TunedDense
        given = numbers(4, 6, 16, dtype=torch.float32).requires_grad_()
        with torch.autocast("cpu", BF):
            y = layer(given, NO_TAP)
        (y.float() * numbers(4, 6, 16, seed=3, dtype=torch.float32)).sum().backward()
        found.append([y.float(), given.grad, *(p.grad for p in layer.parameters())])
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 2**-7 * b.norm()


def test_only_hopper_and_what_fills_it_suits(monkeypatch):
    monkeypatch.setattr(hopper, "available", lambda: True)
    monkeypatch.setattr(hopper, "blocks", lambda: 132)
    assert gelu.suits(OnGpu(65536, 768), OnGpu(3072, 768))
    assert not gelu.suits(OnGpu(65536, 764), OnGpu(3072, 764))
    assert not gelu.suits(OnGpu(65536, 768), OnGpu(3076, 768))
    assert not gelu.suits(OnGpu(65536, 1024), OnGpu(4096, 1024))
    assert not gelu.suits(OnGpu(1024, 768), OnGpu(3072, 768))
    assert not gelu.suits(torch.zeros(65536, 8, dtype=BF), torch.zeros(3072, 8, dtype=BF))
    monkeypatch.setattr(hopper, "available", lambda: False)
    assert not gelu.suits(OnGpu(65536, 768), OnGpu(3072, 768))


@pytest.mark.gpu
@pytest.mark.skipif(not hopper.available(), reason="no Hopper GPU with a compiler on this machine")
def test_on_a_gpu():
    from glassformer.bench.gpu.cuda_kernels import gelu_products_equal_their_definition

    assert all(finding.passed for finding in gelu_products_equal_their_definition())
