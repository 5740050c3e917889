"""cuBLASLt is told the right matrices: what it is told is carried out here by hand. Products themselves need a GPU."""

import itertools

import numpy as np
import pytest
import torch

from glassformer.kernels.toolchain import cublas
from glassformer.kernels.toolchain.cublas import Sizes, Stored

BF = torch.bfloat16


def as_seen(memory: np.ndarray, stored: Stored) -> np.ndarray:
    """The matrix that column-wise reading of some memory finds."""
    places = np.arange(stored.rows)[:, None] + stored.step * np.arange(stored.columns)[None, :]
    found = memory[places]
    return found.T if stored.turned else found


@pytest.mark.parametrize(("left_turned", "right_turned"), [*itertools.product((False, True), repeat=2)])
@pytest.mark.parametrize("more", [0, 5])
def test_what_the_library_sees_is_the_product(left_turned, right_turned, more):
    M, N, K = 3, 5, 7
    random = np.random.default_rng(0)
    left, right = random.normal(size=(M, K)), random.normal(size=(K, N))
    kept = []
    for matrix, turned in ((left, left_turned), (right, right_turned)):
        stored = matrix.T if turned else matrix
        wide = random.normal(size=(stored.shape[0], stored.shape[1] + more))  # a part of wider rows
        wide[:, : stored.shape[1]] = stored
        kept.append(wide)
    steps = (kept[0].shape[1], kept[1].shape[1])
    sizes = Sizes(M, N, K, (BF, BF), (left_turned, right_turned), steps, False, False, True, 0)
    first, second, out = sizes.seen()
    made = as_seen(kept[1].ravel(), first) @ as_seen(kept[0].ravel(), second)
    assert made.shape == (out.rows, out.columns)
    memory = np.zeros(M * N)
    memory[np.arange(out.rows)[:, None] + out.step * np.arange(out.columns)[None, :]] = made
    assert np.allclose(memory.reshape(M, N), left @ right)


def test_the_fastest_has_the_least_median():
    assert cublas.fastest([[3.0, 1.0, 9.0], [2.0, 2.5, 2.0], [2.0, 9.0, 9.0]]) == 1
    assert cublas.fastest([[1.0], [1.0]]) == 0


def test_without_a_gpu_there_is_nothing_to_multiply_with():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert not cublas.available()
    x = torch.zeros(16, 16, dtype=BF)
    assert not cublas.suits(x, x)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_products_on_a_gpu_are_torchs():
    from glassformer.bench.gpu.cuda_kernels import tuned_products_equal_torchs

    assert all(finding.passed for finding in tuned_products_equal_torchs())


def test_rows_that_cannot_be_read_as_they_are_become_a_copy():
    x = torch.arange(16 * 24, dtype=torch.float32).to(BF).view(16, 24)
    assert cublas._in_rows(x) is x
    assert cublas._in_rows(x[:, :16]).data_ptr() == x.data_ptr()
    for odd in (x.T, x[:, 1:17], x[:1].expand(16, 24), x.view(-1)[3:323].view(16, 20)):
        made = cublas._in_rows(odd)
        assert made.is_contiguous()
        assert torch.equal(made, odd)


@pytest.mark.parametrize(("left_turned", "right_turned"), [*itertools.product((False, True), repeat=2)])
def test_a_product_is_described_by_its_factors(left_turned, right_turned, monkeypatch):
    seen = []
    monkeypatch.setattr(cublas, "_plan", lambda sizes: seen.append(sizes) or (lambda *given: None))
    left, right = torch.zeros(8, 16, dtype=BF), torch.zeros(16, 24, dtype=BF)
    given = [(t.T if turn else t).contiguous() for t, turn in ((left, left_turned), (right, right_turned))]
    out = cublas.multiply(*given, left_turned, right_turned)
    assert out.shape == (8, 24)
    assert (seen[0].M, seen[0].N, seen[0].K) == (8, 24, 16)
    assert seen[0].steps == (given[0].shape[1], given[1].shape[1])
