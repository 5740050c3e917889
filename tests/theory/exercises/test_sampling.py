"""The solutions about samplers against the oracle's exact distributions."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from glassformer.reference.sampling import distribution
from glassformer.theory.exercises import sampling as module

logits = st.lists(st.integers(-400, 400), min_size=1, max_size=9, unique=True).map(lambda z: np.array(z) / 100)


@given(logits, st.floats(0.1, 5))
def test_temperature(z, tau):
    assert np.allclose(module.temperature(z, tau), distribution(z, temperature=tau), atol=1e-12)


@given(logits, st.integers(1, 12))
def test_top_k(z, k):
    assert np.allclose(module.top_k(z, k), distribution(z, top_k=k), atol=1e-12)


@given(logits, st.sampled_from([0.03, 0.31, 0.57, 0.83, 1.0]))
def test_top_p(z, p):
    assert np.allclose(module.top_p(z, p), distribution(z, top_p=p), atol=1e-12)
