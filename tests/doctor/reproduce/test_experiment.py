"""What an experiment may use."""

import pytest

from glassformer.doctor.reproduce.calls import Calls
from glassformer.doctor.reproduce.experiment import Experiment
from tests.doctor.reproduce.scripts import adapted, finding


def test_missing_arguments_and_evidence():
    subject = adapted("padding_labels")  # an encoder without a cache
    e = Experiment(subject, finding("pad_leak/content-left", rows=None), Calls(subject))
    assert e.get("rows", 3) == 3
    assert e.needs("mask") == "attention_mask"
    with pytest.raises(LookupError, match="takes no cache"):
        e.needs("cache")
    assert "1e-06" in e.rounding
