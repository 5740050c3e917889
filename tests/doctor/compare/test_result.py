"""A comparison in words and as JSON."""

import json
import math

from glassformer import config as c
from glassformer.doctor.compare import compare
from glassformer.doctor.compare.conventions import CONVENTIONS
from glassformer.doctor.compare.result import Measured
from glassformer.finding import Verdict
from tests.doctor.compare.pairs import ours, theirs


def test_the_text_names_place_convention_and_numbers():
    result = compare(theirs("gpt2"), ours("gpt2", norm=c.LayerNorm(eps=1e-3)), names=("theirs", "ours"))
    text = result.text()
    assert text.startswith("A  theirs\nB  ours\n\nthey differ at blocks.0.attention.normed: ")
    assert "likely convention: eps of the norm\n  A is LayerNorm(eps=1e-05), B is LayerNorm(eps=0.001)" in text
    assert "blocks.0.attention.normed " in text
    assert "<- first" in text
    made = json.loads(json.dumps(result.to_dict()))
    assert (made["verdict"], made["first"]) == ("differ", "blocks.0.attention.normed")
    assert made["explanation"]["convention"] in CONVENTIONS
    assert {f["verdict"] for f in made["findings"]} == {"fail"}
    assert made["parameters"] is None


def test_equal_models_say_same_and_what_rounding_did():
    result = compare(theirs("bert"), ours("bert"))
    assert "same: " in result.text()
    assert "in their own precision is rounding" in result.text()
    assert all(f.passed for f in result.findings)


def test_a_case_that_could_not_be_asked_is_a_skip():
    missing = Measured("x", None, None, 1e-9, "", "no cache")
    assert missing.agrees is None
    assert missing.finding().verdict is Verdict.SKIP
    assert Measured("x", 1.0, math.nan, 1e-9, "").agrees is False


def test_other_weights_are_named_with_the_same_names():
    other = ours("gpt2")
    other.decoder.blocks[1].attention.v.weight.data[3, 4] += 1
    result = compare(ours("gpt2"), other)
    assert (result.first, result.convention) == ("blocks.1.attention.projected_v", "weights")
    expected = "first weight that differs: decoder.blocks.1.attention.v.weight, other numbers at 1 of 576 entries"
    assert expected in result.text()
