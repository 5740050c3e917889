"""The chunked head and loss are the plain ones, value and gradient."""

import pytest
import torch
import torch.nn.functional as F

from glassformer.training import chunked_loss
from glassformer.training.chunked_loss import cross_entropy_sum, linear_cross_entropy


@pytest.fixture(params=[1, 7, 1000])
def _rows_per_chunk(request, monkeypatch):
    monkeypatch.setattr(chunked_loss, "CHUNK_BYTES", 4 * 31 * request.param)


@pytest.mark.usefixtures("_rows_per_chunk")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("z_loss", [0.0, 0.3])
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_cross_entropy_of_the_logits(smoothing, z_loss, with_bias):
    generator = torch.Generator().manual_seed(0)
    h, w, b = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((23, 5), (31, 5), (31,)))
    targets = torch.randint(0, 31, (23,), generator=generator)
    targets[[3, 11]] = -100
    inputs = [h, w, b] if with_bias else [h, w]
    for t in inputs:
        t.requires_grad_()
    logits = F.linear(h, w, b if with_bias else None)
    counted = targets != -100
    expected = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
    expected = expected + z_loss * (logits.logsumexp(-1).square() * counted).sum()
    expected_gradients = torch.autograd.grad(2 * expected, inputs)
    total, plain = linear_cross_entropy(
        h, w, targets, b if with_bias else None, label_smoothing=smoothing, z_loss=z_loss
    )
    # totals are kept in float32
    assert torch.isclose(total.double(), expected, rtol=1e-6)
    assert torch.isclose(plain.double(), F.cross_entropy(logits, targets, reduction="sum"), rtol=1e-6)
    for got, wanted in zip(torch.autograd.grad(2 * total, inputs), expected_gradients, strict=True):
        assert (got - wanted).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.parametrize(("columns", "rows"), [(65, 128), (257, 320), (72, 72)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_vocabulary_of_any_size_is_padded_without_effect(columns, rows, with_bias):
    """In bf16, against float64: factors are numbers that bf16 holds, sums are rounded by 2^-9 of logits of about 2, and
    probabilities err by as much of themselves. A column too many would be one more of about `columns`."""
    generator = torch.Generator().manual_seed(0)
    h, w, b = (torch.randn(s, generator=generator) for s in ((23, 64), (columns, 64), (columns,)))
    h, w, b = (t.bfloat16().double().requires_grad_() for t in (0.25 * h, w, b))
    targets = torch.randint(0, columns, (23,), generator=generator)
    targets[[3, 11]] = -100
    inputs = (h, w, b) if with_bias else (h, w)
    wanted = linear_cross_entropy(h, w, targets, b if with_bias else None, -100, 0.1, 0.01)
    narrow = [t.detach().float().requires_grad_() for t in inputs]
    seen = []

    plain = chunked_loss.chunk_gradients

    def spy(logits, *rest):
        seen.append((logits.shape[1], rest[-1]))
        return plain(logits, *rest)

    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", torch.bfloat16):
        patch.setattr(chunked_loss, "gradients_of", lambda logits: spy)
        patch.setattr(chunked_loss, "row_multiple", lambda device, dtype, float8: 8)  # as on a GPU
        found = linear_cross_entropy(*narrow[:2], targets, narrow[2] if with_bias else None, -100, 0.1, 0.01)
    assert set(seen) == {(rows, columns)}
    for a, b in zip(found, wanted, strict=True):
        assert abs(float(a.detach() / b.detach()) - 1) < 2e-3
    exact = torch.autograd.grad(wanted[0], inputs)
    for a, b in zip(torch.autograd.grad(found[0], narrow), exact, strict=True):
        assert a.shape == b.shape
        assert float((a.double() - b).norm() / b.norm()) < 0.01


@pytest.mark.usefixtures("_rows_per_chunk")
@pytest.mark.parametrize("with_bias", [False, True])
def test_without_gradients_it_is_the_sum_of_all_chunks(with_bias):
    generator = torch.Generator().manual_seed(0)
    h, w, b = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((23, 5), (31, 5), (31,)))
    targets = torch.randint(0, 31, (23,), generator=generator)
    targets[[3, 11]] = -100
    bias = b if with_bias else None
    wanted = F.cross_entropy(F.linear(h, w, bias), targets, reduction="sum")
    assert torch.isclose(cross_entropy_sum(h, w, targets, bias).double(), wanted, rtol=1e-6)


def test_autocast_computes_in_bf16_and_gives_gradients_in_float32():
    h, w = torch.randn(9, 8, requires_grad=True), torch.randn(17, 8, requires_grad=True)
    targets = torch.arange(9)
    with torch.autocast("cpu", torch.bfloat16):
        total, _ = linear_cross_entropy(h, w, targets)
    total.backward()
    assert h.grad.dtype == w.grad.dtype == torch.float32
    exact = F.cross_entropy(h @ w.T, targets, reduction="sum")
    assert torch.isclose(total, exact, rtol=0.02)


@pytest.mark.usefixtures("_rows_per_chunk")
@pytest.mark.parametrize("settings", [(0.0, 0.0), (0.1, 0.05)])
def test_in_8_bits_it_is_near_the_exact_one(settings):
    """Factors err by up to 0.036 (e4m3) and 0.072 (e5m2) of themselves (test_fp8.py), logits so by 0.051 of
    theirs, 2.0: 0.1, and a probability by as much of itself. 23 rows are filled up to 32."""
    pytest.importorskip("glassformer.kernels")
    generator = torch.Generator().manual_seed(0)
    h, w = (torch.randn(s, generator=generator, requires_grad=True) for s in ((23, 64), (31, 64)))
    scaled = 0.25 * h
    targets = torch.randint(0, 31, (23,), generator=generator)
    targets[[3, 11]] = -100
    exact = linear_cross_entropy(scaled.double(), w.double(), targets, None, -100, *settings)
    found = linear_cross_entropy(scaled, w, targets, None, -100, *settings, float8=True)
    assert abs(float(found[0].detach() / exact[0].detach()) - 1) < 0.02
    assert abs(float(found[1].detach() / exact[1].detach()) - 1) < 0.02
    wanted = torch.autograd.grad(2 * exact[0], (h, w), retain_graph=True)
    for a, b in zip(torch.autograd.grad(2 * found[0], (h, w)), wanted, strict=True):
        assert a.dtype == b.dtype
        assert 0.02 < float((a - b).norm() / b.norm()) < 0.13


def test_all_ignored_is_zero_with_zero_gradient():
    h, w = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    total, plain = linear_cross_entropy(h, w, torch.full((3,), -100), z_loss=0.1)
    total.backward()
    assert float(plain) == 0
    assert h.grad.abs().max() == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own compiler
def test_compiled_it_has_the_same_gradient():
    """Compilers have lost gradients written in place here. bench/gpu/cuda_check.py asks the same of a GPU's."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 16, requires_grad=True), torch.randn(500, 16, requires_grad=True)
    targets = torch.randint(0, 500, (64,))
    wanted = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets)[0], (hidden, weight))
    found = torch.autograd.grad(torch.compile(linear_cross_entropy)(hidden, weight, targets)[0], (hidden, weight))
    for a, b in zip(wanted, found, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", [(0.0, 0.0), (0.1, 0.0), (0.0, 0.3), (0.1, 0.05)])
@pytest.mark.parametrize("columns", [None, 29])
def test_written_in_place_the_gradient_is_the_same(settings, columns):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(23, 31, generator=generator)
    targets = torch.randint(0, 29, (23,), generator=generator)
    for ignored in ([], [3, 11]):
        targets[ignored] = -100
        wanted = chunked_loss.chunk_gradients(logits, targets, -100, *settings, columns)
        found = chunked_loss.chunk_gradients_in_place(logits.clone(), targets, -100, *settings, columns)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        half = logits.bfloat16()
        wanted = chunked_loss.chunk_gradients(half, targets, -100, *settings, columns)
        found = chunked_loss.chunk_gradients_in_place(half.clone(), targets, -100, *settings, columns)
        assert found[2].dtype is torch.bfloat16
        for a, b in zip(found, wanted, strict=True):  # the gradient is rounded to 8 bits, the sums are not
            torch.testing.assert_close(a, b, rtol=1e-5 if a.dim() == 0 else 2**-7, atol=1e-6)
    for dtype in (torch.float32, torch.bfloat16):
        assert chunked_loss.gradients_of(logits.to(dtype)) is chunked_loss.chunk_gradients_in_place
