"""Turns: the order rotates, a death is noted, and the others go on."""

import pytest

from glassformer.bench.peers.base import Order
from glassformer.bench.race import prepare, race, rotated
from glassformer.bench.result import Row

pytestmark = pytest.mark.usefixtures("fake_processes")


def entry(name, task="decode", **setting):
    return Order(name, "ours", task, "float32", "", setting=setting), Row(name, "float32", ours=False)


def test_every_contender_is_in_every_position_once():
    rows = [Row(name, "", ours=False) for name in "abc"]
    orders = [[row.name for row in rotated(rows, turn)] for turn in range(3)]
    assert orders == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]
    assert rotated([], 3) == []


def test_rounds_rotate_and_fill_the_rows(tmp_path):
    log = str(tmp_path / "turns")
    entries = [entry(name, log=log, rate=rate) for name, rate in (("a", 10.0), ("b", 20.0), ("c", 30.0))]
    messages = []
    race(entries, 3, messages.append)
    turns = [line.split() for line in (tmp_path / "turns").read_text().splitlines()]
    assert [name for _, name in turns] == list("abcbcacab")
    assert [row.rounds for _, row in entries] == [[10.0] * 3, [20.0] * 3, [30.0] * 3]
    assert [row.first for _, row in entries] == [[0.25] * 3] * 3
    assert entries[0][1].version == "1.0"
    assert "loading a float32" in messages
    assert "round 3 of 3" in messages


def test_the_others_go_on_when_one_dies():
    entries = [entry("a"), entry("b", die_at=1), entry("c", die_at="load")]
    race(entries, 3, lambda line: None)
    (_, a), (_, b), (_, c) = entries
    assert (len(a.rounds), a.died) == (3, "")
    assert (len(b.rounds), b.died) == (1, "MemoryError: all of it is gone")
    assert (len(c.rounds), c.died) == (0, "RuntimeError: no weights here")
    assert [row.measured for row in (a, b, c)] == [True, False, False]


def test_losses_of_training_are_joined_in_order():
    entries = [entry("a", task="train", ids=[[3.0, 2.0]])]
    race(entries, 2, lambda line: None)
    assert entries[0][1].ids == [[3.0, 2.0, 3.0, 2.0, 3.0, 2.0]]


def test_a_converter_that_fails_takes_its_contender_out():
    entries = [entry("a"), entry("b", die_at="load")]
    made = prepare(entries, lambda line: None)
    assert [row.name for _, row in made] == ["a"]
    assert entries[1][1].died == "its converter failed: RuntimeError: no weights here"
