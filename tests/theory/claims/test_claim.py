"""What a claim concludes from its evidence, and what it never calls a pass."""

import json
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from glassformer.finding import Finding, Verdict
from glassformer.theory.claims.claim import Badge, Erratum, Kind, Lab, conclude, plain, reached, solve
from tests.theory.claims.invented import words

LAB = Lab()
ERRATUM = Erratum("E99", ("a book",), "wrong", "two is odd", "it is even", "two is even", "holds = 2 % 2 == 1")


def test_one_failure_fails_the_claim_and_is_named():
    parts = [LAB.exact("a", True), LAB.numerical("b", 2.0, 1.0), LAB.exact("c", True)]
    found = conclude(words(), [replace(part, why="too far") for part in parts])
    assert found.verdict is Verdict.FAIL
    assert found.why == "b: too far"
    assert (found.measured, found.bound) == (2.0, 1.0)


def test_the_tightest_measurement_represents_a_pass():
    parts = [LAB.numerical("loose", 0.1, 1.0), LAB.numerical("tight", 0.9, 1.0), LAB.exact("exact", True)]
    assert conclude(words(), parts).measured == 0.9


def test_skips_alone_and_refuted_errata_alone_are_no_pass():
    skipped = LAB.skipped("by z3", Kind.EXACT, "z3 is not installed")
    assert conclude(words(), [skipped]).verdict is Verdict.SKIP
    assert conclude(words(), []).verdict is Verdict.SKIP
    assert ERRATUM.examine().passed
    assert conclude(words(), [skipped, ERRATUM.examine()]).verdict is Verdict.SKIP


def test_a_skipped_part_is_named_with_the_other_evidence():
    found = conclude(words(), [LAB.skipped("by z3", Kind.EXACT, "z3 is missing"), LAB.exact("by hand", True)])
    assert found.verdict is Verdict.PASS
    assert "not examined: by z3 (z3 is missing)" in found.why


def test_an_erratum_that_starts_to_hold_fails_the_claim():
    holds = Erratum("E98", ("a book",), "wrong", "two is even", "-", "-", "holds = 2 % 2 == 0")
    assert conclude(words(), [LAB.exact("a", True), holds.examine()]).verdict is Verdict.FAIL


def test_a_reason_is_found_by_the_id_and_filled_with_its_parts_and_the_evidence():
    reasons = {"<dtype>, <case>": "rounding of <dtype>, <size> tokens", "float32, <case>": "near", "exact": "equal"}
    claim = words(evidence=reasons)
    assert claim.reason(LAB.exact("float64, rotary", True, size=7)) == "rounding of float64, 7 tokens"
    assert claim.reason(LAB.exact("float32, rotary", True)) == "near"  # the key with more text of its own
    assert claim.reason(LAB.exact("exact", True)) == "equal"
    with pytest.raises(KeyError, match="no reason for 'inexact'"):
        claim.reason(LAB.exact("inexact", True))


def test_no_cases_and_no_number_are_failures():
    assert LAB.exhaustive("none", 0, 0).verdict is Verdict.FAIL
    assert LAB.numerical("nan", float("nan"), 1.0).verdict is Verdict.FAIL


def test_without_z3_a_proof_is_a_skip_and_with_it_can_fail(monkeypatch):
    pytest.importorskip("z3")
    assert solve(LAB, "p", lambda z3: True).passed
    assert solve(LAB, "p", lambda z3: False).verdict is Verdict.FAIL
    monkeypatch.setitem(__import__("sys").modules, "z3", None)
    found = solve(LAB, "p", lambda z3: True)
    assert found.verdict is Verdict.SKIP
    assert "pip install" in found.remedy
    assert "[theory]'" in found.remedy


@pytest.mark.parametrize(
    ("recorded", "run", "left_out", "badge"),
    [
        (Badge.PROVED, {Kind.EXACT, Kind.NUMERICAL}, set(), Badge.PROVED),
        (Badge.PROVED, {Kind.EXACT}, {Kind.EMPIRICAL}, Badge.PROVED),
        (Badge.PROVED, {Kind.EXACT, Kind.NUMERICAL}, {Kind.EXACT}, Badge.VERIFIED),
        (Badge.PROVED, {Kind.STATISTICAL}, {Kind.EXHAUSTIVE}, Badge.VERIFIED),
        (Badge.PROVED, {Kind.EMPIRICAL}, {Kind.EXACT}, Badge.ILLUSTRATED),
        (Badge.PROVED, set(), {Kind.EXACT}, Badge.NOT_RUN),
        (Badge.VERIFIED, {Kind.NUMERICAL}, {Kind.EXACT}, Badge.VERIFIED),
        (Badge.VERIFIED, {Kind.EMPIRICAL}, {Kind.NUMERICAL}, Badge.ILLUSTRATED),
        (Badge.ILLUSTRATED, {Kind.NUMERICAL}, {Kind.EMPIRICAL}, Badge.ILLUSTRATED),
        (Badge.ILLUSTRATED, set(), set(), Badge.NOT_RUN),
    ],
)
def test_a_badge_is_that_of_the_evidence_that_was_examined(recorded, run, left_out, badge):
    ran = [LAB._mark(kind, Finding.judge(str(kind), 0, 1, "")) for kind in run]
    skipped = [LAB.skipped(f"no {kind}", kind, "it is missing", "install it") for kind in left_out]
    found = conclude(words(badge=recorded), [*ran, *skipped, ERRATUM.examine()])
    assert found.evidence["badge"] == str(badge)
    assert reached(words(badge=recorded), found.evidence["parts"]) is badge
    if ran and skipped:
        assert "(it is missing; to examine it, install it)" in found.why


def test_evidence_of_every_library_becomes_json():
    odd = {
        "a": np.float64(1.5),
        "b": np.arange(3),
        "c": torch.tensor([1.0, float("nan")]),
        "d": (Fraction(1, 3), float("inf")),
        4: {"x": True, "y": None},
    }
    result = json.loads(json.dumps(plain(odd), allow_nan=False))
    assert result == {"a": 1.5, "b": [0, 1, 2], "c": [1.0, "nan"], "d": ["1/3", "inf"], "4": {"x": True, "y": None}}


def test_generators_depend_on_seed_and_stream_only():
    draw = lambda seed, stream: float(Lab(seed).rng(stream).random())  # noqa: E731
    assert draw(1, 2) == draw(1, 2)
    assert len({draw(0, 0), draw(0, 1), draw(1, 0)}) == 3
    assert torch.equal(torch.rand(2, generator=Lab(3).torch_rng()), torch.rand(2, generator=Lab(3).torch_rng()))
