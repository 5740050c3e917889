from glassformer import size, tour
from glassformer.presets import nano
from glassformer.tour_text import print_tour


def test_engine_equals_oracle_on_every_stop():
    findings = list(tour.engine_against_oracle())
    assert len(findings) == 6
    assert all(f.passed for f in findings)
    assert all(f.measured > 0 for f in findings)  # exactly zero would mean something was compared with itself


def test_cache_races_agree_and_gain_with_length():
    short, long = tour.cache_races((8, 96))
    assert short.same_tokens
    assert long.same_tokens
    assert long.speed_up > 0


def test_samplers_show_distributions():
    rows = {row.name: row for row in tour.samplers_on_one_distribution()}
    assert all(abs(sum(row.probabilities) - 1) < 1e-12 for row in rows.values())
    assert rows["greedy"].kept == 1
    assert rows["top-k 4"].kept == 4
    assert rows["temp 0.5"].entropy < rows["as it is"].entropy < rows["temp 2"].entropy
    assert rows["penalty 2"].probabilities[2] < rows["as it is"].probabilities[2]


def test_the_printed_tour_tells_the_truth(capsys, monkeypatch):
    monkeypatch.setattr(tour.cache_races, "__defaults__", ((8, 16),))
    assert print_tour(size.size(nano())) == 0
    shown = capsys.readouterr().out
    assert "Everything held." in shown
    assert shown.count("pass  engine = oracle") == 6


def test_a_broken_engine_fails_the_tour(capsys, monkeypatch):
    monkeypatch.setattr(tour.cache_races, "__defaults__", ((8,),))
    monkeypatch.setattr(tour, "BOUND", 1e-300)
    assert print_tour(size.size(nano())) == 1
    assert "did NOT hold" in capsys.readouterr().out
