"""Products in 8 bits: what is rounded is rounded as the formats say.

Bounds. Rounding to the nearest of b mantissa bits errs by u = 2^-b / sqrt(12) of the power of two below a number, in
the root mean square: at most u of the number, 0.036 in e4m3 (b = 3) and 0.072 in e5m2 (b = 2). A product of independent
matrices errs by sqrt(u^2 + v^2) of its own root mean square, however long the sums are. Numbers are larger than the
power of two below them, by 1.47 in the root mean square of a log-uniform one: the errors found are about 0.7 of these.
"""

import math

import pytest
import torch

from glassformer.kernels.cuda.training import fp8, fp8_cuda
from glassformer.model.layers import ACTIVATIONS

U4, U5 = 2**-3 / math.sqrt(12), 2**-2 / math.sqrt(12)
FORMATS = {fp8.E4M3: U4, fp8.E5M2: U5}


def rms(x):
    return float(x.detach().double().square().mean().sqrt())


def off(found, wanted):
    """The error's root mean square, relative to the wanted one's."""
    return rms(found.double() - wanted.double()) / rms(wanted)


def random(*shape, seed=0, spread=1.0):
    return spread * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", FORMATS)
def test_rounding_is_to_the_nearest_ties_to_even(dtype):
    """Against all 256 codes: no other is nearer, and of two equally near ones the even one is taken."""
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(dtype).double()
    numbers, codes = numbers[numbers.isfinite()], codes[numbers.isfinite()]
    positive = numbers[numbers > 0].sort().values
    middles = (positive[1:] + positive[:-1]) / 2
    x = torch.cat(
        [positive, middles, -middles, middles * 1.001, random(999).double(), 20 * random(99).double()]
    ).float()
    taken = fp8.quantise(x, 1.0, dtype)
    distance = (x.double()[:, None] - numbers).abs()
    nearest = distance.min(1).values
    assert torch.equal((x.double() - taken.double()).abs(), nearest)
    tied = (distance == nearest[:, None]).sum(1) > 1
    tied &= taken.float() != 0
    assert tied.sum() > 100
    assert not (taken.view(torch.uint8)[tied] % 2).any()


@pytest.mark.parametrize(("dtype", "u"), FORMATS.items())
def test_rounding_errs_as_the_bounds_here_say(dtype, u):
    x = random(20_000)
    assert 0.6 * u < off(fp8.quantise(x, 1.0, dtype).float(), x) < u


@pytest.mark.parametrize("dtype", FORMATS)
def test_large_values_saturate_and_nan_and_infinity_stay_visible(dtype):
    given = torch.tensor([1e9, -1e9, 3e38, math.nan, math.inf, -math.inf, 0.0, 1e-30])
    found = fp8.quantise(given, 2.0, dtype).float()
    limit = fp8.LARGEST[dtype]
    assert float(torch.finfo(dtype).max) == limit
    assert found[:3].tolist() == [limit, -limit, limit]
    assert found[3:6].isnan().all()
    assert found[6:].tolist() == [0, 0]


def test_a_unit_is_the_power_of_two_below_the_root_mean_square():
    for value in (1.0, 0.999, 2.0, 3.7, 1e-9, 1e9):
        scale = float(fp8.scale_of(torch.tensor(value).square()))
        assert math.log2(scale) == int(math.log2(scale))
        assert scale <= value * (1 + 1e-6) < 2 * scale * (1 + 2e-6)
    assert fp8.scale_of(torch.tensor(0.0)) == 1
    assert fp8.scale_of(torch.tensor(1e-44)) == fp8.SMALLEST_SCALE
    assert fp8.scale_of(torch.tensor(math.nan)).isnan()
    assert fp8.scale_of(torch.tensor(math.inf)).isnan()


@pytest.mark.parametrize("kind", fp8_cuda.KINDS)
def test_slopes_are_those_of_the_engines_activations(kind):
    y = torch.linspace(-6, 6, 501, dtype=torch.float64, requires_grad=True)
    wanted = ACTIVATIONS[kind](y)
    (slope,) = torch.autograd.grad(wanted.sum(), y)
    assert torch.allclose(fp8.SLOPES[kind](y.detach()), slope, atol=1e-12)


def test_casts_come_with_their_transposes():
    x, d = random(32, 48), random(32, 48, seed=1).bfloat16()
    scale = torch.tensor(0.5)
    x8, transposed = fp8.cast(x, scale, fp8.E4M3)
    assert torch.equal(x8.float().T, transposed.float())
    assert transposed.is_contiguous()
    d8, d_transposed, post_transposed, sums = fp8.activate_backward(d, x.bfloat16(), scale, scale, "gelu", True)
    assert torch.equal(d8.float().T, d_transposed.float())
    assert torch.equal(post_transposed.float().T, fp8.activate(x.bfloat16(), scale, "gelu").float())
    assert off(d8.float().sum(0) * 0.5, sums) < 0.2
    assert fp8.activate_backward(d, x.bfloat16(), scale, scale, "gelu", False)[3].numel() == 0


def test_matrices_are_cast_into_one():
    a, b, scale = random(32, 48), random(32, 16, seed=1), torch.tensor(0.5)
    found, transposed = fp8.cast_all([a, b], scale, fp8.E4M3, True, None)
    assert torch.equal(found.float(), torch.cat([fp8.cast(t, scale, fp8.E4M3)[0].float() for t in (a, b)], 1))
    assert torch.equal(transposed.float(), found.float().T)
    found, transposed = fp8.cast_all([a.T, b.T], scale, fp8.E4M3, False, 80)
    assert found.shape == (80, 32)
    assert torch.equal(found[:64].float().T, fp8.cast_all([a, b], scale, fp8.E4M3, True, None)[0].float())
    assert not found[64:].float().any()
    assert torch.equal(fp8.transpose(found).float(), transposed.float())


def test_a_sample_of_a_large_tensor_misses_no_row_and_no_column(monkeypatch):
    """An eighth of it, whatever its shape: each column is met, and each row that is 16 lines or longer."""
    x = torch.arange(4096 * 768).view(4096, 768)
    for columns in (768, 1024, 512, 2048):
        taken = fp8.sample(x.view(-1, columns).int())
        assert taken.numel() == x.numel() // 8
        assert len(taken.unique()) == taken.numel()
        assert len((taken % columns).unique()) == columns
        assert len((taken // columns).unique()) == x.numel() // columns
    normal = random(256, 512) * torch.linspace(0, 2, 256)[:, None]
    monkeypatch.setattr("glassformer.kernels.cuda.training.fp8_cuda.SAMPLED_FROM", 2**16)
    some, all_of_it = fp8.mean_squares([normal, normal[:8]], True), fp8.mean_squares([normal, normal[:8]], False)
    assert 0 < abs(float(some[0] / all_of_it[0]) - 1) < 0.1
    assert some[1] == all_of_it[1]


def test_a_sample_meets_what_only_few_positions_have():
    """One position in 64 has a gradient, at any place in its period: a share near an eighth of those lines is read."""
    for period, columns in ((64, 64), (49, 64), (56, 128), (512, 64)):
        for place in (0, 5, period - 1):
            x = torch.zeros(512 * period // 8, columns).bfloat16()
            x[place::period] = 1.0
            share = float(fp8.sample(x).float().mean() / x.float().mean())
            assert 0.4 < share < 2.0, (period, columns, place)


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_product_is_as_far_off_as_its_factors_are_rounded(dtype):
    a, b, bias = random(64, 512, spread=0.01), random(96, 512, seed=1, spread=7.0), random(96, seed=2).bfloat16()
    units = [fp8.scale_of(fp8.mean_square(t)) for t in (a, b)]
    a8, b8 = fp8.cast(a, units[0], dtype)[0], fp8.cast(b, units[1], fp8.E4M3)[0]
    found = fp8.matmul(a8, b8, *units, None)
    assert found.dtype == torch.bfloat16
    bound = math.hypot(FORMATS[dtype], U4)
    assert 0.5 * bound < off(found, a.double() @ b.double().T) < bound
    wanted = (a8.double() @ b8.double().T) * units[0] * units[1] + bias.double()
    assert off(fp8.matmul(a8, b8, *units, bias), wanted) < 2**-8


def test_the_operators_keep_to_their_declared_shapes():
    x, scale = random(32, 16), torch.tensor(1.0)
    targets = torch.arange(32) % 16
    for operator, given in (
        (fp8.cast_all, ([x], scale, fp8.E5M2, False, None)),
        (fp8.cast_all, ([x, x.bfloat16()], scale, fp8.E5M2, False, 80)),
        (fp8.cast_all, ([x, x.bfloat16()], scale, fp8.E4M3, True, None)),
        (fp8.transpose, (fp8.cast(x, scale, fp8.E5M2)[0],)),
        (fp8.square_parts, ([x, x.bfloat16(), scale], False)),
        (fp8.square_parts, ([x], True)),
        (fp8.activate, (x.bfloat16(), scale, "silu")),
        (fp8.activate_backward, (x.bfloat16(), x.bfloat16(), scale, scale, "silu", True)),
        (fp8.activate_backward, (x.bfloat16(), x.bfloat16(), scale, scale, "silu", False)),
        (fp8.matmul, (fp8.cast(x, scale, fp8.E4M3)[0], fp8.cast(x, scale, fp8.E4M3)[0], scale, scale, None)),
        (fp8.loss_gradients, (x.bfloat16(), targets, -100, 0.1, 0.1, 16)),
    ):
        torch.library.opcheck(operator, given, test_utils="test_faketensor")


def test_a_cpu_is_refused_in_words():
    assert "needs a CUDA GPU, and this run is on the cpu" in fp8.unsupported_device(torch.device("cpu"))


def test_an_old_gpu_is_refused_in_words(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an older one")
    assert "8.9 or more, and an older one has 8.0" in fp8.unsupported_device(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert fp8.unsupported_device(torch.device("cuda")) is None
