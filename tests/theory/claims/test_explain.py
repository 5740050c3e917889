"""A claim in full: every part of it is there, in lines that fit."""

import pytest

from glassformer.theory.claims.explain import explain, paragraphs, part_numbers, short
from glassformer.theory.claims.run import Plan, run


@pytest.fixture(scope="module")
def outcome():
    return next(run(["orthogonal-inputs-fixed-point"]))


@pytest.mark.parametrize("width", [60, 80, 96])
def test_everything_is_printed_and_fits(outcome, width):
    text = explain(outcome, width)
    for title in ("Statement", "Sources", "Derivation", "Evidence (seed 0", "Negative control", "Errata"):
        assert f"\n{title}" in text
    assert all(part["id"] in " ".join(text.split()) for part in outcome.parts)
    assert all(f"{erratum.id} ({erratum.flaw}; " in " ".join(text.split()) for erratum in outcome.claim.errata)
    assert "weights = np.exp(x @ x.T)" in text
    assert "$" not in text.replace("`", "")
    assert "\\" not in text.split("Errata")[0]
    code = {line.strip() for erratum in outcome.claim.errata for line in erratum.example.splitlines()}
    wrapped = [line for line in text.splitlines() if line.strip() not in code]
    assert max(map(len, wrapped)) <= width


def test_a_control_shows_what_failed():
    (broken,) = run(["rope-relative"], Plan(broken=True))
    assert "\nfail  " in explain(broken)
    assert ", not " in explain(broken)


def test_displayed_formulas_stand_alone():
    lines = paragraphs("Let it be $$a = b$$ then.", 40, "> ").splitlines()
    assert lines == ["> Let it be", ">     a = b", "> then."]


def test_numbers_of_a_part_say_how_it_came_out():
    def part(kind, measured, bound, verdict="pass", low=None, **evidence):
        facts = {"measured": measured, "bound": bound, "verdict": verdict, "evidence": {"kind": kind, **evidence}}
        return {**facts, **({} if low is None else {"low": low})}

    assert part_numbers(part("exact", 0.0, 0.0)) == ""
    assert part_numbers(part("exhaustive", 0.0, 0.0, cases=1200)) == "0 of 1,200 cases wrong"
    assert part_numbers(part("numerical", 0.25, 0.5)) == "0.25 <= 0.5"
    assert part_numbers(part("empirical", 3.0, 4.0, low=2.0)) == "2 <= 3 <= 4"
    assert part_numbers(part("numerical", 0.75, 0.5, "fail")) == "0.75, not it <= 0.5"
    assert part_numbers(part("numerical", None, None, "skip")) == ""


def test_long_values_are_cut_and_say_so():
    assert short([0.1] * 3) == "[0.1, 0.1, 0.1]"
    assert short(list(range(50))).endswith("11, ... (50)]")
    assert short({"a": 1.23456789}) == "{a: 1.23457}"
