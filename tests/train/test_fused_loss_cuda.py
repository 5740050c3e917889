"""The CUDA kernel of the loss, compiled for the CPU, against the plain chunk."""

import ctypes
from pathlib import Path

import pytest
import torch

from glassformer.train import fused_loss_cuda as cuda
from glassformer.train.fused_loss import chunk_gradients
from tests.emulated_cuda import built, needs_compiler


def emulated(logits, targets, folder, *settings):
    text = cuda.source(logits.shape[1], settings[1] != 0)
    library = built(text, "loss", folder, Path(__file__).parent)
    assert library.size() == ctypes.sizeof(cuda.Given)
    gradients, rows = torch.full_like(logits, float("nan")), torch.full((2, len(logits)), float("nan"))
    library.run(ctypes.byref(cuda.arguments(logits, gradients, targets, rows, *settings)), len(logits), cuda.THREADS)
    return *rows.sum(1), gradients


@needs_compiler
@pytest.mark.parametrize(("columns", "smoothing", "z_loss"), [(904, 0.0, 0.0), (5000, 0.1, 1e-3)])
def test_it_is_the_plain_chunk(columns, smoothing, z_loss, tmp_path, monkeypatch):
    monkeypatch.setattr(cuda, "THREADS", 64)
    torch.manual_seed(0)
    logits = (4 * torch.randn(4, columns)).bfloat16()
    logits[0, 7] = 60.0
    targets = torch.tensor([7, -100, columns - 1, 3])
    found = emulated(logits, targets, tmp_path, -100, smoothing, z_loss)
    wanted = chunk_gradients(logits, targets, -100, smoothing, z_loss)
    for name, a, b in zip(("total", "plain"), found, wanted, strict=False):
        assert torch.allclose(a, b, rtol=1e-5), name
    # both are float32 rounded to bfloat16: a last place where float32 stood near a half
    assert torch.allclose(found[2].float(), wanted[2].float(), rtol=2**-7, atol=1e-6)
    assert not found[2][1].any()


@needs_compiler
def test_what_is_no_number_stays_none(tmp_path, monkeypatch):
    monkeypatch.setattr(cuda, "THREADS", 32)
    logits = torch.zeros(2, 64).bfloat16()
    logits[0, 5] = float("nan")
    logits[1, 5] = float("inf")
    total, plain, gradients = emulated(logits, torch.tensor([1, 2]), tmp_path, -100, 0.0, 0.0)
    assert total.isnan()
    assert plain.isnan()
    assert gradients.isnan().any(1).all()


def test_only_rows_that_fit_are_taken():
    assert cuda.fits(torch.empty(1, 50304, dtype=torch.bfloat16))
    assert not cuda.fits(torch.empty(1, 50257, dtype=torch.bfloat16))
    assert not cuda.fits(torch.empty(1, 50304))
    assert not cuda.fits(torch.empty(1, 128256, dtype=torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_on_a_gpu_it_is_the_plain_chunk():
    from benchmarks.cuda_check import cuda_loss_equals_plain

    assert all(finding.passed for finding in cuda_loss_equals_plain())
