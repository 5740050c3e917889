"""The table: ranked, plain in a pipe, and with a sentence per target."""

import io

from glassformer.bench.result import Bandwidth, Group, Result, Row
from glassformer.bench.show import show
from glassformer.finding import Finding, Verdict


def shown(groups, findings=(), load=0.0):
    machine = {"processor": "A CPU", "flags": ["avx2"], "cores": 2, "load_average": [load]}
    out = io.StringIO()
    plan = {"task": "decode", "threads": 2}
    show(Result(plan, machine, {"llama.cpp": "llama_cpp not installed"}, groups, list(findings)), out)
    return out.getvalue()


def test_the_table_is_plain_in_a_pipe_and_ranked():
    rows = [
        Row("slow", "float32", False, [10.0, 12.0], agrees="the same ids"),
        Row("glassformer", "float32", True, [2000.0]),
        Row("dead", "float32", False, died="[Errno 1] gone"),
    ]
    group = Group("float32", "tokens/s", "", rows, Bandwidth("memory", "", False, [3e10] * 3), weight_bytes=1e7)
    text = shown([group])
    assert all(line == line.rstrip() for line in text.splitlines())
    lines = text.splitlines()
    names = [line.split()[0] for line in lines if line.strip()]
    assert names.index("glassformer") < names.index("slow") < names.index("dead")
    assert not set(text) & set("│─┃━\x1b")
    assert "died: [Errno 1] gone" in text
    assert "memory bandwidth: 30.0 GB/s in the best round" in text
    slow = next(line for line in lines if line.split()[:1] == ["slow"])
    assert slow.split()[1:8] == ["11", "10", "12", "18%", "0.005", "1.000", "0%"]
    assert "llama.cpp: not measured, llama_cpp not installed" in text
    assert "busy" not in text


def test_targets_are_sentences_and_passes_of_checks_are_silent():
    findings = [
        Finding.judge("same-ids:a", 0, 0, "why"),
        Finding.judge("same-ids:b", 3, 0, "why", "look."),
        Finding.within("target:decode:float32", 1.25, 1.0, None, "we 5, they 4"),
        Finding("target:decode:int8", Verdict.FAIL, 0.5, None, "we 2, they 4", "missed by 0.500.", low=1.0),
    ]
    text = shown([], findings, load=9.0)
    assert "same-ids:a" not in text
    assert "fail  same-ids:b" in text
    assert "decode, float32: reached, 1 <= 1.25 (we 5, they 4)." in text
    assert "decode, int8: missed by 0.500" in text
    assert "the machine was busy" in text


def test_figures_that_mean_nothing_are_not_printed():
    """A spread of 195 % gives neither a median nor a ratio, and a share of 806 % of the bandwidth is none."""
    rows = [
        Row("glassformer", "float32", True, [806.0] * 3),
        Row("wild", "float32", False, [1.0, 10.0, 20.5], agrees="the same ids"),
    ]
    group = Group("float32", "tokens/s", "", rows, Bandwidth("memory", "", False, [1e9] * 3), weight_bytes=1e7)
    text = shown([group])
    ours, wild = (next(line for line in text.splitlines() if line.split()[:1] == [row.name]) for row in rows)
    assert ours.split()[1:] == ["806", "806", "806", "0%", "1.000", "-", "-"]
    assert wild.split()[1:8] == ["-", "1", "20.5", "195%", "-", "-", "-"]
    assert "disturbed: its rounds spread by 195%, more than 50%; the same ids" in wild
    assert "806%" not in text
    group.bandwidth.rounds = [1e9, 2e9, 3e9]
    assert "memory bandwidth: not measured: disturbed: the fastest rounds" in shown([group])
