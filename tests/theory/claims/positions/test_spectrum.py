"""Heads that look back, and the heat map."""

import zlib

import mpmath
import numpy as np
import pytest

from glassformer.model import positions
from glassformer.theory.claims.claim import Lab
from glassformer.theory.claims.positions import spectrum
from glassformer.theory.claims.positions.sinusoids import engine_table


def test_the_heads_scores_are_products_of_positions():
    table = engine_table(20, 8)
    np.testing.assert_allclose(spectrum.head_scores(8, 20, np.eye(8), 0.0), table @ table.T, atol=1e-13)


def test_toeplitz_is_measured():
    exact = np.arange(5)[:, None] - np.arange(5)[None, :]
    assert spectrum.off_toeplitz(exact) == 0
    exact[3, 1] += 2
    assert spectrum.off_toeplitz(exact) == 2


def test_the_numbers_of_the_contract():
    found = {p.id: p.evidence for p in spectrum.relative_score(Lab())}
    assert found["a head looks 17 back"]["best"] == pytest.approx(32)
    assert found["a head looks 17 back"]["runner_up"] == pytest.approx(30.9168, abs=5e-5)


def test_the_checksum_is_that_of_forty_digits():
    thousandths = np.empty((2048, 64), "<i2")
    with mpmath.workdps(40):
        for i in range(32):
            w = mpmath.mpf(10000) ** (-mpmath.mpf(2 * i) / 64)
            for n in range(2048):
                cos, sin = mpmath.cos_sin(n * w)
                thousandths[n, 2 * i : 2 * i + 2] = int(mpmath.nint(1000 * sin)), int(mpmath.nint(1000 * cos))
    assert zlib.crc32(thousandths.tobytes()) == spectrum.HEAT_MAP


def test_an_engine_that_counts_positions_from_one_fails(monkeypatch):
    whole = positions.sinusoids
    monkeypatch.setattr(positions, "sinusoids", lambda places, width, spec: whole(places + 1, width, spec))
    failed = {p.id for p in spectrum._columns(Lab()) if not p.passed}
    assert failed == {"column sums", "heat map checksum"}
