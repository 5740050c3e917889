"""What exercises share."""

import numpy as np

from glassformer.theory.exercises.exercise import softmax


def test_softmax_subtracts_the_maximum_by_default():
    scores = np.array([[1000.0, 999.0], [-1000.0, -1001.0]])
    assert np.allclose(softmax(scores), [[0.731059, 0.268941]] * 2)
    assert not np.isfinite(softmax(scores, shift=False)).any()
    assert np.allclose(softmax(scores, axis=0).sum(0), 1)
