"""The CUDA kernel of the loss, compiled for the CPU, against the plain chunk."""

import ctypes
from pathlib import Path

import pytest
import torch

from glassformer.kernels.cuda.training import copies
from glassformer.kernels.cuda.training import loss as cuda
from glassformer.kernels.toolchain import nvrtc
from glassformer.training.chunked_loss import chunk_gradients, head_gradients
from tests.emulated_cuda import built, needs_compiler


class Emulated:
    """In place of nvrtc.Kernel."""

    def __init__(self, text, name):
        self.library = built(text, name, Path(__file__).parent)
        assert self.library.size() == ctypes.sizeof(cuda.Arguments)

    def launch(self, given, blocks, threads):
        self.library.run(ctypes.byref(given), blocks, threads)


def emulated(logits, targets, *settings, columns=None):
    gradients = torch.full_like(logits, float("nan"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvrtc, "kernel", lambda text, name, device, shared: Emulated(text, name))
        rows = cuda.write_gradients(logits, gradients, targets, *settings, columns or logits.shape[1])
    return *rows.sum(1), gradients


@pytest.mark.sample(1)
@needs_compiler
@pytest.mark.parametrize(("columns", "smoothing", "z_loss"), [(904, 0.0, 0.0), (5000, 0.1, 1e-3)])
def test_it_is_the_plain_chunk(columns, smoothing, z_loss, monkeypatch):
    monkeypatch.setattr(cuda, "THREADS", 64)
    torch.manual_seed(0)
    logits = (4 * torch.randn(4, columns)).bfloat16()
    logits[0, 7] = 60.0
    targets = torch.tensor([7, -100, columns - 1, 3])
    found = emulated(logits, targets, -100, smoothing, z_loss)
    wanted = chunk_gradients(logits, targets, -100, smoothing, z_loss)
    for name, a, b in zip(("total", "plain"), found, wanted, strict=False):
        assert torch.allclose(a, b, rtol=1e-5), name
    # both are float32 rounded to bfloat16: a last place where float32 stood near a half
    assert torch.allclose(found[2].float(), wanted[2].float(), rtol=2**-7, atol=1e-6)
    assert not found[2][1].any()


@pytest.mark.sample(2)
@needs_compiler
@pytest.mark.parametrize(
    ("columns", "stride", "smoothing", "z_loss"),
    [(65, 128, 0.1, 1e-3), (897, 960, 0.0, 0.0), (257, 320, 0.1, 0.0), (64, 128, 0.0, 1e-3)],
)
def test_columns_beyond_the_logits_count_for_nothing(columns, stride, smoothing, z_loss, monkeypatch):
    """Whatever they hold: a row as long as another that ends there gives the same loss and gradient, then zeros."""
    monkeypatch.setattr(cuda, "THREADS", 32)
    torch.manual_seed(0)
    logits = (4 * torch.randn(4, stride)).bfloat16()
    logits[:, columns:] = torch.tensor([900.0, -900.0, float("nan"), float("inf")]).bfloat16()[:, None]
    targets = torch.tensor([7, -100, columns - 1, 3])
    found = emulated(logits, targets, -100, smoothing, z_loss, columns=columns)
    wanted = chunk_gradients(logits[:, :columns], targets, -100, smoothing, z_loss)
    for name, a, b in zip(("total", "plain"), found, wanted, strict=False):
        assert torch.allclose(a, b, rtol=1e-5), name
    assert torch.allclose(found[2][:, :columns].float(), wanted[2].float(), rtol=2**-7, atol=1e-6)
    assert not found[2][:, columns:].view(torch.int16).any()
    padded = chunk_gradients(logits, targets, -100, smoothing, z_loss, columns)
    assert torch.equal(padded[2][:, :columns], wanted[2])
    assert not padded[2][:, columns:].any()
    assert torch.equal(padded[0], wanted[0])


@needs_compiler
def test_rows_too_long_to_keep_are_read_twice_and_are_the_same(monkeypatch):
    monkeypatch.setattr(cuda, "THREADS", 32)
    torch.manual_seed(0)
    logits, targets = (4 * torch.randn(3, 1000)).bfloat16(), torch.tensor([7, -100, 996])
    kept = emulated(logits, targets, -100, 0.1, 1e-3, columns=997)
    monkeypatch.setattr(cuda, "MAX_ROW_BYTES", 1999)
    for a, b in zip(kept, emulated(logits, targets, -100, 0.1, 1e-3, columns=997), strict=True):
        assert torch.equal(a, b)


@needs_compiler
def test_nan_and_infinity_stay_visible(monkeypatch):
    monkeypatch.setattr(cuda, "THREADS", 32)
    logits = torch.zeros(2, 64).bfloat16()
    logits[0, 5] = float("nan")
    logits[1, 5] = float("inf")
    total, plain, gradients = emulated(logits, torch.tensor([1, 2]), -100, 0.0, 0.0)
    assert total.isnan()
    assert plain.isnan()
    assert gradients.isnan().any(1).all()


@needs_compiler
def test_logits_of_minus_infinity_have_no_share(monkeypatch):
    """Not even where a thread, or a warp, sees nothing else."""
    monkeypatch.setattr(cuda, "THREADS", 64)
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 1024).bfloat16(), torch.tensor([600, 1023])
    logits[0, :256], logits[1, 64:72], logits[0, 700:710] = -torch.inf, -torch.inf, -torch.inf
    total, plain, gradients = emulated(logits, targets, -100, 0.0, 1e-3)
    wanted = chunk_gradients(logits, targets, -100, 0.0, 1e-3)
    assert torch.allclose(torch.stack([total, plain]), torch.stack(wanted[:2]), rtol=1e-5)
    assert torch.allclose(gradients.float(), wanted[2].float(), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("logits", [torch.empty(1, 50257, dtype=torch.bfloat16), torch.empty(1, 50304)])
def test_only_supported_rows_are_accepted(logits):
    with pytest.raises(AssertionError):
        emulated(logits, torch.zeros(1, dtype=torch.int64), -100, 0.0, 0.0)


def test_rows_of_large_vocabularies_do_not_stay_in_shared_memory():
    assert cuda.stays_in_shared_memory(50304)
    assert not cuda.stays_in_shared_memory(128256)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_on_a_gpu_it_is_the_plain_chunk():
    from glassformer.bench.gpu.cuda_kernels import cuda_loss_equals_plain

    assert all(finding.passed for finding in cuda_loss_equals_plain())


@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 1e-3)])
def test_the_definition_is_the_plain_chunk(smoothing, z_loss):
    torch.manual_seed(0)
    logits, targets = 4 * torch.randn(4, 96), torch.tensor([7, -100, 80, 3])
    (totals, plains), gradient = cuda.definition(logits, targets, -100, smoothing, z_loss, 81)
    wanted = chunk_gradients(logits, targets, -100, smoothing, z_loss, 81)
    for a, b in zip((totals.sum(), plains.sum(), gradient), wanted, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    narrow = logits.bfloat16()
    torch.library.opcheck(cuda.loss_rows, (narrow, targets, -100, smoothing, z_loss, 81), test_utils="test_faketensor")


@pytest.mark.parametrize("with_bias", [False, True])
def test_gradients_of_a_head_are_those_of_plain_torch(with_bias):
    torch.manual_seed(0)
    hidden, weight = torch.randn(16, 32).bfloat16(), torch.randn(64, 32).bfloat16()
    bias = torch.randn(64).bfloat16() if with_bias else None
    given = (hidden, weight, bias, torch.randint(0, 60, (16,)), (-100, 0.1, 1e-3), 60)
    for a, b in zip(cuda.head_gradients(*given), head_gradients(*given), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert torch.allclose(a.float(), b.float(), rtol=2**-6, atol=2**-6 * float(b.float().abs().max()))


def test_it_is_looked_up_on_a_gpu_in_bfloat16_only(monkeypatch):
    from glassformer.kernels.training import head_kernel

    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    for there in (True, False):
        monkeypatch.setattr(nvrtc, "can_launch", lambda there=there: there)
        found = head_kernel(gpu, torch.bfloat16, False)
        assert found == ((copies.of_head, cuda.head_gradients) if there else None)
        assert head_kernel(gpu, torch.float32, False) is None
        assert head_kernel(cpu, torch.bfloat16, False) is None
