"""One identifier per convention, shared with the doctor."""

import re
from pathlib import Path

from glassformer.doctor import compare
from glassformer.doctor.causes import RANK
from glassformer.doctor.compare.conventions import CONVENTIONS
from glassformer.doctor.compare.scene import Explanation
from glassformer.doctor.report import TITLES

SOURCES = [path.read_text() for path in Path(compare.__file__).parent.glob("explain*.py")]


def test_every_explanation_has_an_identifier_of_the_table():
    used = {name for text in SOURCES for name in re.findall(r'Explanation\(\s*"(\w+)"', text)}
    assert len(used) > 25
    assert used <= CONVENTIONS.keys()


def test_a_convention_that_is_a_diagnosis_has_its_identifier():
    for name, convention in CONVENTIONS.items():
        assert convention.diagnosis is None or convention.diagnosis in RANK
        assert name not in TITLES or convention.diagnosis == name


def test_the_fault_of_one_explanation_wins_over_the_table():
    assert Explanation("gelu_variant", "", 0.0).diagnosis == "activation"
    assert Explanation("mask", "", 0.0, "window").diagnosis == "window"
    assert Explanation("mask", "A sees B's keys; ABC", 0.0).with_names("one", "two") == "one sees two's keys; ABC"
