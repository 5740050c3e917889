"""Cold starts: one process at a time, what cannot be avoided next to them."""

import pytest

from glassformer.bench import startup
from glassformer.bench.peers.base import Order
from glassformer.bench.result import Row


@pytest.mark.usefixtures("fake_processes")
def test_seconds_of_contenders_and_of_what_is_unavoidable(monkeypatch, tmp_path):
    plain = {"quick": ["-S", "-c", "pass"], "broken": ["-c", "raise SystemExit('no such thing')"]}
    monkeypatch.setattr(startup, "PLAIN", plain)
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    orders = [
        (Order(name, "ours", "startup", "float32", "", setting=setting), Row(name, "float32", ours=True))
        for name, setting in (("a", {"ids": [[5]]}), ("b", {"die_at": "load"}))
    ]
    rows = startup.plain_rows()
    startup.measure(orders, rows, tmp_path, 2, lambda line: None)
    (_, a), (_, b) = orders
    assert len(a.rounds) == 2
    assert all(0 < seconds < 60 for seconds in a.rounds)
    assert (a.ids, a.version) == ([[5]], "1.0")
    assert b.died == "RuntimeError: no weights here"
    quick, broken, reading = rows
    assert (quick.measured, reading.measured) == (True, True)
    assert broken.died == "no such thing"


def test_the_plain_rows_are_the_imports_and_the_help():
    assert {"import torch", "import glassformer", "glass --help", startup.READING} <= {
        row.name for row in startup.plain_rows()
    }
