"""The times of the doctor: which examinations count, and what is printed."""

import pytest

from glassformer.bench.developer import doctor_times as times
from tests.bench.developer.test_doctor_sweep import HEALTHY, KNOWN, REFUSED


def test_quartiles_of_few_and_of_many():
    assert times.quartiles([3.0]) == (3.0, 3.0, 3.0)
    assert times.quartiles([4.0, 0.0, 1.0, 3.0, 2.0]) == (1.0, 2.0, 3.0)


def test_only_examinations_count():
    slow = {**HEALTHY, "seconds": 4.0}
    text = times.lines([KNOWN, slow, REFUSED], 40.0)
    assert text[0].startswith("tiny: median 3.00 s (quartiles 2.50 and 3.50, longest 4.0) of 2 classes")
    assert text[1] == "GPT-2 small: 40.0 s; wanted 44 s"
    assert times.lines([REFUSED], None) == ["no class could be examined"]


def test_every_nth_class_is_examined(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(times, "class_names", lambda: ["A", "B", "C"])
    monkeypatch.setattr(times, "examine", lambda name, seconds: asked.append(name) or HEALTHY)
    assert times.main(["--every", "2", "--without-gpt2"]) == 0
    assert asked == ["GPT2LMHeadModel", "A", "C"]
    assert "median 2.00 s" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        times.main(["--every", "0"])
