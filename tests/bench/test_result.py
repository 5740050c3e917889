"""Rounds to figures."""

import json

import pytest

from glassformer.bench.result import Bandwidth, Group, Result, Row, number
from glassformer.finding import Finding, Verdict


def row(name, *rounds, ours=False, died=""):
    return Row(name, "float32", ours, list(rounds), died=died)


def test_medians_spread_and_ratios():
    ours, slow, fast = row("ours", 10.0, 12.0, 11.0, ours=True), row("slow", 2.0, 2.0), row("fast", 22.0, 20.0, 24.0)
    group = Group("float32", "tokens/s", rows=[ours, slow, fast, row("dead", 99.0, died="gone"), row("unrun")])
    assert (ours.median, ours.spread) == (11.0, pytest.approx(2 / 11))
    assert group.best_peer() is fast
    assert group.ours() is ours
    assert group.ratio(ours, fast) == 0.5
    assert group.ratio(slow, ours) == pytest.approx(2 / 11)
    assert group.ratio(group.rows[3], ours) is None


def test_of_seconds_fewer_is_better():
    ours, peer = row("ours", 2.0, ours=True), row("peer", 1.0)
    group = Group("float32", "seconds", rows=[ours, peer, row("late", 9.0)], fewer_is_better=True)
    assert group.best_peer() is peer
    assert group.ratio(ours, peer) == 0.5
    group.compared = False
    assert group.ratio(ours, peer) is None


def test_the_share_of_the_bandwidth_counts_steps_not_rows():
    ours = row("ours", 80.0, ours=True)
    group = Group("float32", "tokens/s", rows=[ours], weight_bytes=10.0, batch=1)
    group.bandwidth = Bandwidth("memory", "float32", False, [1000.0, 990.0, 400.0, 995.0])
    assert group.of_limit(ours) == 0.8
    group.batch = 8
    assert group.of_limit(ours) == 0.1
    group.bandwidth = None
    assert group.of_limit(ours) is None


def test_json_holds_every_round_and_survives_json():
    group = Group("float32", "tokens/s", rows=[row("ours", 1.0, 1.5, ours=True), row("dead", died="gone")])
    found = Finding.judge("same-ids:x", 0, 0, "why")
    result = Result({"task": "decode"}, {"cores": 2}, {"y": "not here"}, [group], [found])
    facts = json.loads(json.dumps(result.to_dict()))
    first, dead = facts["groups"][0]["rows"]
    assert (first["rounds"], first["median"], first["low"], first["high"]) == ([1.0, 1.5], 1.25, 1.0, 1.5)
    assert (dead["median"], dead["died"], dead["ratio_to_ours"]) == (None, "gone", None)
    assert facts["missing"] == {"y": "not here"}
    assert facts["findings"][0]["verdict"] == "pass"


def test_what_was_disturbed_has_a_reason_instead_of_a_figure():
    ours, wild = row("ours", 10.0, 10.0, 10.0, ours=True), row("wild", 1.0, 10.0, 20.5)
    group = Group("float32", "tokens/s", rows=[ours, wild], weight_bytes=10.0)
    group.bandwidth = Bandwidth("memory", "float32", False, [100.0, 300.0, 800.0])
    result = json.loads(json.dumps(Result({}, {}, {}, [group]).to_dict()))["groups"][0]
    assert result["rows"][0]["disturbed"] is None
    assert result["rows"][0]["median"] == 10.0
    assert result["rows"][0]["ratio_to_best_peer"] is None
    assert result["rows"][0]["of_bandwidth"] is None
    assert result["rows"][1]["disturbed"] == "disturbed: its rounds spread by 195%, more than 50%"
    assert (result["rows"][1]["median"], result["rows"][1]["rounds"]) == (None, [1.0, 10.0, 20.5])
    assert result["bandwidth_bytes_per_second"] is None
    assert "fastest rounds of reading memory differ" in result["bandwidth_disturbed"]


def test_a_missed_target_is_sound_a_wrong_model_is_not():
    missed = Finding("target:decode", Verdict.FAIL)
    wrong = Finding("same-ids:x", Verdict.FAIL)
    assert Result({}, {}, {}, [], [missed]).sound
    assert not Result({}, {}, {}, [], [missed, wrong]).sound


def test_numbers():
    assert [number(x) for x in (12345.6, 61.6123, 0.271)] == ["12,346", "61.61", "0.271"]
