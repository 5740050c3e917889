"""The tour as data and in a terminal, at sizes that take seconds. tests/tour/test_report.py has its page."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from glassformer.config import ConfigError
from glassformer.finding import Finding, Verdict
from glassformer.tour import guide as tour
from glassformer.tour import text as tour_text
from glassformer.tour import training as tour_training
from glassformer.tour.training import Plan, Training
from glassformer.training.data import corpus
from glassformer.training.data.corpus import DataError

SMALL = ("model.n_layers=2", "model.d_model=32", "model.attention.n_heads=2", "model.max_len=32", "loop.batch=4")
SMALL = (*SMALL, "model.feedforward.d_ff=64", "loop.eval_batches=2")
POEM = "".join(f"{n} green bottles, hanging on the wall, and if one falls: {n - 1}.\n" for n in range(300, 0, -1))


def tiny_plan(folder, **changes):
    text = folder / "bottles.txt"
    text.write_text(POEM)
    cache = f"data.cache={folder / 'tokens'}"
    given = {"minutes": 0.01, "out": folder / "tour", "changes": (*SMALL, f"data.corpus={text}", cache), "races": (4,)}
    return Plan(**{**given, **changes})


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    """A tour of seconds, and the events its listener heard."""
    events = []
    return tour.walk(tiny_plan(tmp_path_factory.mktemp("walk")), events.append), events


def test_engine_equals_oracle_on_every_stop():
    findings = list(tour.engine_against_oracle())
    assert len(findings) == 6
    assert all(f.passed for f in findings)
    assert all(f.measured > 0 for f in findings)  # exactly zero would mean something was compared with itself


def test_cache_races_agree():
    short, long = tour.cache_races((4, 16))
    assert short.same_tokens
    assert long.same_tokens
    assert long.speed_up > 0
    assert tour.same_tokens([short, long]).passed
    assert not tour.same_tokens([short, dataclasses.replace(long, same_tokens=False)]).passed


def test_samplers_show_distributions():
    rows = {row.name: row for row in tour.samplers_on_one_distribution()}
    assert all(abs(sum(row.probabilities) - 1) < 1e-12 for row in rows.values())
    assert rows["greedy"].kept == 1
    assert rows["top-k 4"].kept == 4
    assert rows["temp 0.5"].entropy < rows["as it is"].entropy < rows["temp 2"].entropy
    assert rows["penalty 2"].probabilities[2] < rows["as it is"].probabilities[2]


def test_the_walk_goes_through_every_stage_in_order(walked):
    told, events = walked
    assert [e["number"] for e in events if e["event"] == "stage"] == list(range(1, len(tour.STAGES)))
    assert told.held
    assert [f for f in told.findings if f.verdict is Verdict.FAIL] == []
    heard = [e["finding"] for e in events if e["event"] == "finding"]
    assert heard == told.findings
    assert {e["of"]["event"] for e in events if e["event"] == "training"} >= {"start", "step", "validation", "end"}


def test_training_learns_and_keeps_its_record(walked):
    told, _ = walked
    record = told.training
    assert record.validation[0][0] == 0
    assert record.validation[-1][1] == pytest.approx(record.best)
    assert record.final < told.text.lines["uniform"]
    assert record.final != record.best  # of the whole split, not of a part
    assert list(told.text.lines) == ["uniform", "unigram", "bigram", "5-gram"]
    assert record.validation[-1][0] == told.run.loop.steps
    assert len(record.train) > 2


def test_both_statements_about_a_right_implementation_are_measured(walked):
    findings = {finding.id: finding for finding in walked[0].findings}
    initial = findings["initial loss within 2 % of ln V"]
    assert initial.bound == 0.02
    assert initial.evidence["on_text"] == walked[0].training.validation[0][1]
    assert initial.evidence["ln_v"] == pytest.approx(math.log(walked[0].text.vocab_size))
    overfit = findings["overfits one batch to a loss under 0.01"]
    assert overfit.measured <= overfit.bound == 0.01
    assert overfit.evidence["losses"][0] > 1


def test_every_sampler_speaks_from_the_prompt(walked):
    spoken = walked[0].spoken
    assert [s.sampler for s in spoken] == [*tour_training.SAMPLERS, "4 beams"]
    assert all(s.text.startswith(s.prompt) and len(s.text) > len(s.prompt) for s in spoken)
    assert len({s.text for s in spoken}) > 3


def test_attention_rows_sum_to_one_and_hide_the_future(walked):
    seen = walked[0].attention
    n = len(seen.tokens)
    assert (len(seen.patterns), len(seen.patterns[0]), len(seen.patterns[0][0])) == (2, 2, n)
    for heads in seen.patterns:
        for pattern in heads:
            for t, row in enumerate(pattern):
                assert sum(row) == pytest.approx(1, abs=1e-5)
                assert all(weight == 0 for weight in row[t + 1 :])


def test_a_tour_is_one_json_object(walked):
    found = json.loads(json.dumps(walked[0].to_dict(), allow_nan=False))
    assert set(found) >= {"findings", "size", "corpus", "training", "samples", "cache", "samplers", "seconds"}
    assert [one["control"]["verdict"] for one in found["claims"]] == ["fail", "fail"]
    assert [one["healthy"] for one in found["doctor"]] == [True, False]


def test_theory_is_proven_and_the_missing_mask_is_named(walked):
    told, events = walked
    findings = {finding.id: finding for finding in told.findings}
    assert findings["claim: rope-relative"].passed
    assert findings["its control fails: rope-relative"].passed
    assert findings["the doctor finds nothing in the trained model"].passed
    assert findings["the doctor names the missing mask"].passed
    assert [e["proof"] for e in events if e["event"] == "proof"] == told.proofs
    assert [e["examined"] for e in events if e["event"] == "examined"] == told.examined
    said = tour_text.proof_lines(told.proofs[1])
    assert "Bishop 12.3 has it wrong" in said
    assert "pieces fail" in said
    assert "causal_leak" in tour_text.examined_lines(told.examined[1])
    assert "remedy" not in tour_text.examined_lines(told.examined[0])


def test_the_bigram_line_is_asked_for_only_when_there_was_time(walked):
    told, record = walked[0], Training(final=9.0)
    assert tour_training.beats_bigram(Plan(0.5), told.text, record).verdict is Verdict.SKIP
    assert tour_training.beats_bigram(Plan(2.0), told.text, record).verdict is Verdict.FAIL
    assert tour_training.beats_bigram(Plan(2.0), told.text, Training(final=0.1)).passed


def test_a_wrong_start_and_a_loss_that_stays_fail(walked):
    plan = tiny_plan(Path(walked[0].run.out).parents[1])
    session, _ = tour_training.open_corpus(plan)
    assert tour_training.initial_loss(session).passed
    wide = dataclasses.replace(session.run.model, init_std=0.5)
    loud = dataclasses.replace(session, run=dataclasses.replace(session.run, model=wide))
    assert not tour_training.initial_loss(loud).passed
    assert not tour_training.overfit_one_batch(session, max_steps=2).passed


def test_without_shakespeare_it_says_so_and_goes_on(tmp_path, monkeypatch):
    def nowhere():
        raise DataError("tiny Shakespeare is not on this machine and cannot be downloaded (no network).")

    monkeypatch.setattr(corpus, "shakespeare", nowhere)
    monkeypatch.setattr(corpus, "embedded", lambda: POEM)
    session, text = tour_training.open_corpus(Plan(out=tmp_path, changes=(*SMALL, f"data.cache={tmp_path / 'tokens'}")))
    assert text.name == "embedded"
    assert "not on this machine" in text.note
    assert "manual that comes with Python" in text.note
    assert "not on this machine" in tour_text.corpus_lines(text)
    assert session.data.tokenizer.encode(tour_training.first_prompt(session)).size


def test_a_corpus_that_was_asked_for_is_not_replaced(tmp_path):
    with pytest.raises(DataError, match="nowhere"):
        tour_training.open_corpus(Plan(out=tmp_path, changes=("data.corpus=nowhere.txt",)))
    with pytest.raises(ConfigError, match="colour"):
        tour_training.open_corpus(Plan(out=tmp_path, changes=("loop.colour=1",)))


@pytest.mark.parametrize("minutes", [0, -1, math.nan, math.inf])
def test_minutes_must_be_a_time(minutes):
    with pytest.raises(ValueError, match="positive"):
        Plan(minutes)


def test_out_must_be_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        Plan(out=tmp_path / "file")


def test_a_folder_that_cannot_be_is_told_before_any_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot be written \(Not a directory\): give another folder"):
        tour.walk(Plan(out=tmp_path / "file" / "below"))


@pytest.mark.slow
def test_the_printed_tour_tells_the_truth(capsys, tmp_path):
    plan = tiny_plan(tmp_path)
    assert tour_text.print_tour(plan) == 0
    shown = capsys.readouterr().out
    assert "Everything held." in shown
    assert shown.count("pass  engine = oracle") == 6
    assert "\x1b" not in shown  # plain lines where there is no terminal
    for number, title in enumerate(tour.STAGES, 1):
        assert f"{number}  {title}" in shown
    assert (plan.out / "report.html").exists()
    assert (plan.out / "trained" / "best" / "model.safetensors").exists()


@pytest.mark.parametrize("name", ["report.html", "trained"])
def test_an_earlier_tour_is_refused_before_any_work(tmp_path, name):
    plan = tiny_plan(tmp_path)
    (plan.out / name).mkdir(parents=True)
    (plan.out / name / "old").write_text("mine")
    with pytest.raises(ValueError, match=rf"tour already holds an earlier tour \({name}\): pass --force"):
        tour.walk(plan, lambda event: pytest.fail("it began"))
    assert (plan.out / name / "old").read_text() == "mine"


@pytest.mark.slow
def test_a_second_tour_replaces_the_first_with_force_and_a_failure_is_told(capsys, monkeypatch, tmp_path):
    plan = tiny_plan(tmp_path, force=True)
    (plan.out / "trained").mkdir(parents=True)
    for name in ("log.jsonl", "run.toml", "old"):
        (plan.out / "trained" / name).write_text("")
    monkeypatch.setattr(tour, "BOUND", 1e-300)
    assert tour_text.print_tour(plan) == 1
    shown = capsys.readouterr().out
    assert "did NOT hold" in shown
    assert "fail  engine = oracle" in shown
    assert not (plan.out / "trained" / "old").exists()
    assert "✗ fail" in (plan.out / "report.html").read_text(encoding="utf-8")


def test_in_eighty_columns_no_line_is_broken_inside_a_word():
    import io

    from rich.console import Console

    out, plain = io.StringIO(), io.StringIO()
    lines = {"uniform": 4.174, "unigram": 3.347, "bigram": 2.487, "5-gram": 1.579}
    text = tour_training.Text("shakespeare", "", 1_003_854, 111_540, 65, "", lines)
    for console in (Console(file=out, force_terminal=True, width=80), Console(file=plain, width=80)):
        guide = tour_text.Guide(console)
        guide({"event": "corpus", "text": text})
        for name in tour.small_models():
            same = Finding.judge(f"engine = oracle: {name}", 2.78e-14, 1e-10, "", "")
            guide({"event": "finding", "finding": same})
        guide({"event": "finding", "finding": Finding.judge("x", 2, 1, "one is enough " * 8, "less")})
    assert max(map(len, out.getvalue().splitlines())) <= 80
    assert "\n      is enough one" in out.getvalue()  # below where the sentence began
    assert out.getvalue().split() == plain.getvalue().split()
    assert "65 different ones.\n" in plain.getvalue()


def test_in_a_terminal_the_display_is_live_and_ends_when_interrupted(tmp_path):
    import io

    from rich.console import Console

    out = io.StringIO()
    guide = tour_text.Guide(Console(file=out, force_terminal=True, width=100))
    facts = {"event": "start", "steps": 4, "uniform": 4.2, "baselines": {"bigram": 2.5}}
    guide({"event": "training", "of": facts})
    step = {"event": "step", "step": 2, "loss": 3.0, "gradient_norm": 1.0, "steps_per_second": 2.0}
    guide({"event": "training", "of": step})
    assert guide.display is not None
    guide.close()
    assert guide.display is None
    assert "bigram 2.500" in out.getvalue()
    guide({"event": "finding", "finding": Finding.judge("x", 2, 1, "one is enough", "less")})
    assert "less" in out.getvalue()
