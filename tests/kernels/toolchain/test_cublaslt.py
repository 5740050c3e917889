"""cuBLASLt gets the right matrices: what it is given is multiplied here by hand. Its matmuls need a GPU."""

import numpy as np
import pytest
import torch

from glassformer.kernels.toolchain import cublaslt
from glassformer.kernels.toolchain.cublaslt import Sizes


def column_major(memory, rows, columns):
    return memory[np.arange(rows)[:, None] + rows * np.arange(columns)[None, :]]


@pytest.mark.parametrize("transposed", [True, False])
def test_what_the_library_sees_is_the_matmul(transposed):
    draw = np.random.default_rng(0)
    left, right = draw.normal(size=(3, 7)), draw.normal(size=(7, 5))
    stored = right.T if transposed else right
    first, second, out = Sizes(3, 5, 7, transposed).layouts()
    seen = column_major(stored.ravel(), *first)
    made = (seen.T if transposed else seen) @ column_major(left.ravel(), *second)
    assert made.shape == out
    assert np.allclose(made.T, left @ right)  # a column-major result is the row-major one transposed


def test_what_is_supported(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(cublaslt, "is_available", lambda: True)
    good = torch.zeros(16, 24, dtype=torch.bfloat16)
    assert cublaslt.supports(good, good)
    for wrong in (good.float(), good.t(), torch.zeros(16, 20, dtype=torch.bfloat16), good.view(-1)[4:132].view(16, 8)):
        assert not cublaslt.supports(good, wrong)


def test_without_a_gpu_there_is_nothing_to_multiply_with():
    if torch.cuda.is_available():
        pytest.skip("this machine has an NVIDIA GPU with the library")
    assert not cublaslt.is_available()


def test_the_fastest_algorithm_with_the_same_bits_is_taken(monkeypatch):
    out, last = torch.zeros(4, dtype=torch.bfloat16), []

    def multiply(name):
        last.append(name)
        out.fill_(1.0078125 if name == "other bits" else float("nan") if name == "not a number" else 1.0)
        return 7 if name == "refused" else 0

    seconds = {"slow": 3.0, "fast": 2.0, "other bits": 1.0}
    monkeypatch.setattr(cublaslt, "milliseconds", lambda work: work() or seconds[last[-1]])
    offers = ["refused", "slow", "other bits", "not a number", "fast"]
    assert cublaslt.fastest_equal(offers, multiply, (out,)) == "fast"
    assert cublaslt.fastest_equal(["other bits", *offers], multiply, (out,)) == "other bits"  # it is the first
    with pytest.raises(cublaslt.CudaError, match="refused all"):
        cublaslt.fastest_equal(["refused"], multiply, (out,))


@pytest.mark.gpu
@pytest.mark.skipif(not cublaslt.is_available(), reason="no NVIDIA GPU on this machine")
def test_on_a_gpu():
    from glassformer.bench.gpu.cuda_kernels import gelu_of_cublaslt_equals_its_definition

    assert all(finding.passed for finding in gelu_of_cublaslt_equals_its_definition())
