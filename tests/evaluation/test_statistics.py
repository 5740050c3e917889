"""Standard errors of correlated values, and intervals."""

import math

import numpy as np
import pytest

from glassformer.evaluation.statistics import FEWEST, Spread, grouped, ratio_error, spread, student


def autoregressive(n: int, phi: float, seed: int) -> np.ndarray:
    noise = np.random.default_rng(seed).standard_normal(n)
    noise[0] /= math.sqrt(1 - phi**2)
    for i in range(1, n):
        noise[i] += phi * noise[i - 1]
    return noise


@pytest.mark.parametrize("phi", [0.0, 0.5, 0.9])
def test_blocks_give_the_error_of_an_autoregressive_series(phi):
    n = 10_000
    true = 1 / (1 - phi) / math.sqrt(n)
    found = [spread(autoregressive(n, phi, seed), np.ones(n), [n]).standard_error for seed in range(20)]
    assert np.mean(found) == pytest.approx(true, rel=0.1)
    naive = autoregressive(n, phi, 0).std() / math.sqrt(n)
    if phi:
        assert naive < 0.65 * true


def test_the_block_grows_with_the_correlation():
    short = spread(autoregressive(4000, 0.0, 0), np.ones(4000), [4000])
    long = spread(autoregressive(4000, 0.97, 0), np.ones(4000), [4000])
    assert short.count >= 62
    assert FEWEST <= long.count < short.count
    assert long.block > short.block


def test_a_ratio_of_equal_weights_is_the_error_of_a_mean():
    values = np.random.default_rng(0).normal(size=50)
    assert ratio_error(values, np.ones(50)) == pytest.approx(values.std(ddof=1) / math.sqrt(50))


def test_many_documents_are_the_clusters():
    lengths = [5, 9, 0, 3, 4, 8, 2, 6, 7]
    values = np.concatenate([np.full(length, float(i)) for i, length in enumerate(lengths)])
    found = spread(values, np.ones(len(values)), lengths)
    assert (found.unit, found.count, found.block) == ("documents", 8, None)
    held = np.array([length for length in lengths if length], float)
    sums = np.array([i * length for i, length in enumerate(lengths) if length], float)
    assert found.standard_error == pytest.approx(ratio_error(sums, held))


def test_blocks_do_not_cross_the_end_of_a_document():
    values = np.concatenate([np.zeros(100), np.ones(100)])
    found = spread(values, np.ones(200), [100, 100])
    assert found.unit == "blocks"
    assert found.count == 2 * math.ceil(100 / found.block)


def test_too_few_values_have_no_error():
    found = spread(np.arange(7.0), np.ones(7), [7])
    assert found.standard_error is None
    assert found.interval(1.0) is None
    assert "too few" in found.text()
    assert spread(np.zeros(20), np.ones(20), [20]).standard_error == 0


def test_groups_of_equal_values_have_the_error_of_their_number():
    values = np.random.default_rng(1).normal(size=16)
    repeated = np.repeat(values, 5)
    names = [f"passage {i // 5}" for i in range(80)]
    assert grouped(repeated, names).standard_error == pytest.approx(grouped(values, None).standard_error)
    assert grouped(repeated, None).standard_error < 0.5 * grouped(repeated, names).standard_error
    assert grouped(values[:3], None).standard_error is None


@pytest.mark.parametrize(("freedom", "value"), [(7, 2.3646), (20, 2.0860), (100, 1.9840), (10**6, 1.95997)])
def test_quantiles_of_students_t(freedom, value):
    assert student(0.95, freedom) == pytest.approx(value, abs=1e-3)


def test_an_interval_is_symmetric_about_its_value():
    low, high = Spread(0.1, "blocks", 21, 4).interval(2.0)
    assert (low + high) / 2 == pytest.approx(2.0)
    assert high - 2.0 == pytest.approx(0.2086, abs=1e-4)
