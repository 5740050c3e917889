"""Running many claims: order, workers, seeds, crashes, controls, missing provers."""

import subprocess
import sys

import pytest
import torch

from glassformer.finding import Finding, Verdict
from glassformer.theory.claims.claim import Kind
from glassformer.theory.claims.registry import ClaimError, load_all
from glassformer.theory.claims.run import Outcome, Plan, draw, examine, run, summary
from tests.theory.claims.invented import invented, words

FEW = ["multihead-block-sum", "dense-vs-attention-params", "worked-example-qkv"]


def stripped(outcomes):
    return [{k: v for k, v in outcome.to_dict().items() if k != "seconds"} for outcome in outcomes]


@pytest.fixture(scope="module")
def alone():
    return list(run(FEW))


def test_outcomes_come_in_order_and_hold(alone):
    assert [outcome.claim.id for outcome in alone] == FEW
    assert all(outcome.held and outcome.finding.passed for outcome in alone)


@pytest.mark.slow
def test_two_processes_find_the_same_as_one(alone):
    assert stripped(run(FEW, workers=2)) == stripped(alone)


@pytest.mark.slow
def test_a_seed_repeats_and_another_seed_draws_anew():
    first, again, other = (stripped(run(["dot-product-variance"], Plan(seed=seed))) for seed in (0, 0, 5))
    assert first == again
    assert first != other
    assert other[0]["held"]


def test_threads_are_given_back():
    torch.set_num_threads(2)
    examine("dense-vs-attention-params", Plan())
    assert torch.get_num_threads() == 2


def test_a_crash_is_a_failure_that_names_its_error(monkeypatch):
    def crash(lab):
        yield lab.exact("first", True)
        raise ZeroDivisionError("by nothing")

    with invented(monkeypatch, crash):
        (outcome,) = run(["invented"])
        assert (outcome.finding.verdict, outcome.crashed, outcome.held) == (Verdict.FAIL, True, False)
        assert "crashed: ZeroDivisionError: by nothing (test_run.py, line" in outcome.finding.why
        (control,) = run(["invented"], Plan(broken=True))
        assert not control.held, "a control that crashes has not made its check fail"


def test_a_control_must_make_its_check_fail(monkeypatch):
    def stubborn(lab):
        yield lab.exact("first", True)

    with invented(monkeypatch, stubborn):
        (outcome,) = run(["invented"], Plan(broken=True))
        assert (outcome.expected, outcome.finding.verdict, outcome.held) == (Verdict.FAIL, Verdict.PASS, False)


def test_a_skip_is_as_recorded_only_for_what_trains(monkeypatch):
    def unprovable(lab):
        yield lab.skipped("by z3", Kind.EXACT, "z3 is not installed")

    with invented(monkeypatch, unprovable):
        (outcome,) = run(["invented"])
        assert (outcome.finding.verdict, outcome.held) == (Verdict.SKIP, False)
    slow = Outcome(words(slow=True), Finding.skip("invented", "trains"), 0.0, Plan())
    assert slow.held
    assert not Outcome(slow.claim, slow.finding, 0.0, Plan(slow=True)).held


def without_z3(ids):
    """(held, says that z3 is missing) of each claim, in a process in which `import z3` fails."""
    code = f"""
import sys
sys.modules["z3"] = None
from glassformer.theory.claims.run import run
for outcome in run({ids!r}):
    print(outcome.held, "z3 is not installed" in outcome.finding.why)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.slow
def test_without_z3_a_claim_passes_by_its_other_evidence_and_names_what_is_missing():
    assert without_z3(["convex-weights-upper-bound", "multihead-separation"]) == ["True True"] * 2


@pytest.mark.slow
def test_without_z3_every_claim_has_other_evidence():
    ids = [id for id, claim in load_all().items() if not claim.slow]
    assert {line.split()[0] for line in without_z3(ids)} == {"True"}


@pytest.mark.slow
def test_a_process_that_dies_is_the_failure_of_its_own_claim_only(tmp_path):
    """In a script of its own: the worker of one claim is killed, the others still report."""
    script = tmp_path / "main.py"
    script.write_text(
        """
import os
from glassformer.theory.claims import run as module

def deadly(id, plan):
    if id == "multihead-block-sum":
        os._exit(3)
    return module.examine_here(id, plan)

module.examine_here, module.examine = module.examine, deadly

if __name__ == "__main__":
    ids = ["dense-vs-attention-params", "multihead-block-sum", "worked-example-qkv"]
    for outcome in module.run(ids, workers=2):
        print(outcome.claim.id, outcome.finding.verdict, outcome.crashed)
"""
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "dense-vs-attention-params pass False",
        "multihead-block-sum fail True",
        "worked-example-qkv pass False",
    ], done.stderr


def test_the_summary_is_one_object_with_everything(alone):
    result = summary(alone, Plan())
    assert result["held"]
    assert result["verdicts"] == {"pass": 3, "fail": 0, "skip": 0}
    first = result["claims"][0]
    assert first["id"] == FEW[0]
    assert first["parts"]
    assert {"measured", "bound", "seconds", "expected", "sources", "errata", "badge"} <= first.keys()


def test_figures_are_drawn_when_asked_for():
    (outcome,) = run(["rope-relative"], Plan(draw=True))
    assert outcome.svg.startswith("<svg")
    (without,) = run(["softmax-shift-invariance"], Plan(draw=True))
    assert without.svg == ""
    assert without.held
    with pytest.raises(ClaimError, match="softmax-shift-invariance has no figure"):
        draw("softmax-shift-invariance")


def test_workers_must_be_some():
    with pytest.raises(ClaimError, match="workers=0"):
        list(run(list(load_all()), workers=0))
