"""The printed tour: complete, wrapped in a terminal, plain elsewhere."""

import io

import pytest
from rich.console import Console

from glassformer.finding import Finding
from glassformer.tour import run as tour_run
from glassformer.tour import terminal
from glassformer.tour.training import Corpus
from tests.tour.tiny import tiny_plan


def test_in_eighty_columns_no_line_is_broken_inside_a_word():
    out, plain = io.StringIO(), io.StringIO()
    losses = {"uniform": 4.174, "unigram": 3.347, "bigram": 2.487, "5-gram": 1.579}
    corpus = Corpus("shakespeare", "", 1_003_854, 111_540, 65, "", losses)
    for console in (Console(file=out, force_terminal=True, width=80), Console(file=plain, width=80)):
        printer = terminal.Printer(console)
        printer({"event": "corpus", "result": corpus})
        for name in tour_run.small_models():
            same = Finding.judge(f"engine = oracle: {name}", 2.78e-14, 1e-10, "", "")
            printer({"event": "finding", "finding": same})
        printer({"event": "finding", "finding": Finding.judge("x", 2, 1, "one is enough " * 8, "less")})
    assert max(map(len, out.getvalue().splitlines())) <= 80
    assert "\n      is enough one" in out.getvalue()  # below where the sentence began
    assert out.getvalue().split() == plain.getvalue().split()
    assert "vocabulary of 65 characters.\n" in plain.getvalue()


def test_in_a_terminal_the_display_is_live_and_ends_when_interrupted():
    out = io.StringIO()
    printer = terminal.Printer(Console(file=out, force_terminal=True, width=100))
    facts = {"event": "start", "steps": 4, "uniform": 4.2, "baselines": {"bigram": 2.5}}
    printer({"event": "training", "training_event": facts})
    step = {"event": "step", "step": 2, "loss": 3.0, "gradient_norm": 1.0, "steps_per_second": 2.0}
    printer({"event": "training", "training_event": step})
    assert printer.display is not None
    printer.close()
    assert printer.display is None
    assert "bigram 2.500" in out.getvalue()
    printer({"event": "finding", "finding": Finding.judge("x", 2, 1, "one is enough", "less")})
    assert "less" in out.getvalue()


@pytest.mark.slow
def test_the_tour_prints_every_stage_and_writes_its_files(capsys, tmp_path):
    plan = tiny_plan(tmp_path)
    assert terminal.print_tour(plan) == 0
    shown = capsys.readouterr().out
    assert "All checks passed." in shown
    assert shown.count("pass  engine = oracle") == 6
    assert "\x1b" not in shown  # plain lines where there is no terminal
    for number, title in enumerate(tour_run.STAGES, 1):
        assert f"{number}  {title}" in shown
    assert (plan.out / "report.html").exists()
    assert (plan.out / "trained" / "best" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_second_tour_replaces_the_first_and_a_failure_is_reported(capsys, monkeypatch, tmp_path):
    plan = tiny_plan(tmp_path, force=True)
    (plan.out / "trained").mkdir(parents=True)
    for name in ("log.jsonl", "run.toml", "old"):
        (plan.out / "trained" / name).write_text("")
    monkeypatch.setattr(tour_run, "BOUND", 1e-300)
    assert terminal.print_tour(plan) == 1
    shown = capsys.readouterr().out
    assert "Some checks FAILED" in shown
    assert "fail  engine = oracle" in shown
    assert (plan.out / "trained" / "old").exists()  # no file of a run
    assert (plan.out / "trained" / "best" / "model.safetensors").exists()
    assert "✗ fail" in (plan.out / "report.html").read_text(encoding="utf-8")
