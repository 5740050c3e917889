"""The table of a run: grouped by chapter, live where there is a terminal, whole in the end either way."""

import io

import pytest
from rich.console import Console

from glassformer.finding import Finding, Verdict
from glassformer.theory.claims import TITLES
from glassformer.theory.claims.registry import load_all
from glassformer.theory.claims.run import Outcome, Plan, run
from glassformer.theory.claims.selection import find_sources
from glassformer.theory.claims.show import Board, closing, print_list, source_line, summary_of
from tests.theory.claims.invented import words

IDS = ["multihead-block-sum", "dense-vs-attention-params", "worked-example-qkv"]


def console(terminal, width=110):
    return Console(file=io.StringIO(), width=width, force_terminal=terminal, highlight=False)


def show(outcomes, plan=Plan(), terminal=False, width=110):
    out = console(terminal, width)
    with Board([outcome.claim.id for outcome in outcomes], plan, out).shown() as board:
        for outcome in outcomes:
            board.add(outcome)
    return out.file.getvalue()


@pytest.fixture(scope="module")
def outcomes():
    return list(run(IDS))


@pytest.mark.parametrize("terminal", [False, True])
def test_every_claim_is_listed_under_its_chapter_with_verdict_badge_and_seconds(outcomes, terminal):
    text = show(outcomes, terminal=terminal)
    for outcome in outcomes:
        assert TITLES[outcome.claim.chapter] in text
        row = next(line for line in text.splitlines()[::-1] if outcome.claim.id in line)
        assert "pass" in row
        assert str(outcome.claim.badge).split()[0] in row
        assert f"{outcome.seconds:.1f}" in row
    assert ("\x1b[" in text) == terminal


@pytest.mark.parametrize("width", [60, 80])
def test_in_a_narrow_terminal_a_measurement_and_its_bound_stand_whole_on_one_line(width):
    parts = [
        {"id": str(i), "verdict": "pass", "evidence": {"kind": "exact" if i else "numerical", "cases": 17_102}}
        for i in range(3)
    ]
    longest, trains = load_all()[max(load_all(), key=len)], load_all()["pe-extrapolation"]
    finding = Finding.judge(longest.id, -4.2312e-05, 5.1251e-05, "near", parts=parts)
    why = "it trains a model: runs with --slow"
    found = [
        Outcome(longest, finding, 123.4, Plan()),
        Outcome(trains, Finding.skip(trains.id, why), 0.0, Plan()),
    ]
    text = show(found, width=width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert any("-4.23e-05 <= 5.13e-05" in line for line in lines)
    assert any("51,306 cases" in line for line in lines)
    assert any("2 exact" in line for line in lines)
    assert "…" not in text
    for word in ("it", "trains", "model:", "--slow", "123.4", "verified", "not", "run"):
        assert word in text.split()
    if width == 80:
        assert any(longest.id in line for line in lines)


def test_the_reason_of_a_failure_is_printed_below_its_chapter():
    failed = Outcome(
        words("rope-relative", chapter="positions"), Finding.judge("rope-relative", 2.0, 1.0, "x: too far"), 0.1, Plan()
    )
    text = show([failed])
    assert "fail" in text
    assert "rope-relative: x: too far" in text
    assert closing([failed], Plan()).endswith("1 verdict not as expected.")


def test_a_control_names_the_parts_that_fail():
    plan = Plan(broken=True)
    found = list(run(["rope-relative"], plan))
    text = show(found, plan)
    assert "fails" in text
    failing = [part["id"] for part in found[0].parts if part["verdict"] == Verdict.FAIL]
    assert summary_of(found[0]).endswith(", ".join(failing))
    assert closing(found, plan).startswith("1 of 1 control made")
    stubborn = Outcome(found[0].claim, Finding.judge("rope-relative", 0.0, 0.0, ""), 0.1, plan)
    assert "its negative control did not make it fail" in show([stubborn], plan)
    assert closing([stubborn], plan).startswith("0 of 1 control made")


def test_what_was_skipped_is_counted_and_is_no_pass():
    claim = load_all()["pe-extrapolation"]
    skipped = Outcome(claim, Finding.skip(claim.id, "trains a model: runs with --slow"), 0.0, Plan())
    assert "0 pass, 0 fail, 1 skipped" in closing([skipped], Plan())
    assert "trains a model" in show([skipped])


def test_the_list_has_every_claim_with_its_sources_and_the_absent_exercise():
    out = console(False)
    print_list(list(load_all()), out)
    text = out.file.getvalue()
    assert all(id in text for id in load_all())
    assert "Bishop 12.14: ABSENT" in text
    assert "Ch. 13 ex. 8" in text


def test_a_source_is_printed_with_its_verdict_and_errata():
    (row,) = find_sources("Bishop 12.3")
    assert source_line(row) == "Bishop 12.3: orthogonal inputs => y = x: FALSE (E01, E03)"
