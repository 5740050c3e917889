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


@pytest.mark.usefixtures("fake_processes")
def test_training_starts_cold_and_then_warm_with_the_same_cache(monkeypatch):
    monkeypatch.setattr(startup, "OF_TRAINING", {"quick": ["-S", "-c", "pass"]})
    folders, real = [], startup.Worker

    def worker(order, caches):
        folders.append(caches)
        assert caches.is_dir()
        return real(order, caches)

    monkeypatch.setattr(startup, "Worker", worker)
    rows = [{kind: Row(name, "float32", ours=True) for kind in (startup.COLD, startup.WARM)} for name in "ab"]
    settings = ({"ids": [[5.0, 4.0]]}, {"die_at": "load"})
    orders = [
        (Order(name, "ours", "first-steps", "float32", "", setting=setting), both)
        for name, setting, both in zip("ab", settings, rows, strict=True)
    ]
    plain = startup.plain_rows(training=True)
    startup.measure_training(orders, plain, 2, lambda line: None)
    a, b = rows
    assert [len(row.rounds) for row in (*a.values(), *plain)] == [2, 2, 2]
    assert a["cold"].ids == [[5.0, 4.0]]
    assert b["cold"].died == "RuntimeError: no weights here"
    cold, warm, *_ = folders
    assert cold == warm
    assert len({folders[0], *folders[-2:]}) > 1  # every round has an empty folder
    assert not cold.exists()


def test_the_plain_rows_are_the_imports_and_the_help():
    assert {"import torch", "import glassformer", "glass --help", startup.READING} <= {
        row.name for row in startup.plain_rows()
    }
