import contextlib
import io
import json

import pytest
from rich.console import Console

from glassformer.training.events import Display, Log, baseline_lines, sparkline, time_left

EVENTS = [
    {
        "event": "start", "parameters": 1000, "train_tokens": 5000, "device": "cpu", "precision": "float32",
        "implementation": "torch", "steps": 200, "uniform": 4.17, "baselines": {"5-gram": 1.58, "unigram": 3.35},
        "tokens_per_step": 768, "flops_per_step": 1e9, "peak_flops": 4e10,
    },
    {"event": "step", "step": 100, "loss": 2.5, "gradient_norm": 1.0, "steps_per_second": 20.0, "seconds": 5.0,
     "seconds_left": 41.3},
    {"event": "validation", "step": 100, "loss": 2.6, "best": True, "seconds": 5.0},
    {
        "event": "probe", "step": 100, "accuracy": {"train": 0.5, "validation": 0.25}, "norms": {"total": 12.0},
        "heads": {"induction": [[0.1, 0.875], [0.2, None]]},
    },
    {"event": "sample", "step": 100, "text": "to be\nor [bold]not"},
    {"event": "end", "step": 200, "best": 2.6, "seconds": 10.0},
]  # fmt: skip


def shown(terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100)
    with Display(console) as display:
        for event in EVENTS:
            display(event)
    return out.getvalue()


def test_plain_lines_contain_everything():
    text = shown(False)
    for words in (
        "1,000 parameters, 5,000 training tokens, cpu, float32, torch\n",
        "uniform 4.170  unigram 3.350  5-gram 1.580",
        "validation 2.6000  best",
        "or [bold]not",
        "train accuracy 0.500  validation accuracy 0.250  best induction head 0.88  weight norm 12.00",
    ):
        assert words in text
    assert "done: 200 steps in 10 s, best validation 2.6000" in text


def test_plain_lines_have_no_trailing_blanks_and_count_in_words():
    display = Display(Console(file=io.StringIO()))
    assert display.line({"event": "sample", "step": 1, "text": "a \n\nb"}) == "  | a\n  |\n  | b"
    assert display.line({"event": "end", "step": 1, "best": 2.0, "seconds": 3}).startswith("done: 1 step in 3 s")
    assert "\nrun folder: runs/a-1\n" in display.line({**EVENTS[0], "out": "runs/a-1"})


def test_the_live_display_has_throughput_and_baselines():
    text = shown(True)
    for words in (
        "100 of 200",
        "42 s left",
        "15,360 tokens/s",
        "20 GFLOP/s",
        "MFU 50%",
        "unigram",
        "sample",
        "baselines",
        "best induction",
        "cpu, float32, torch",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, ""), (0.2, "1 s left"), (41.3, "42 s left"), (59.2, "60 s left"), (60, "1.0 minutes left"),
     (750, "12.5 minutes left"), (5399, "90.0 minutes left"), (5400, "1.5 hours left"), (36_000, "10.0 hours left")],
)  # fmt: skip
def test_the_time_left_has_a_suitable_unit(seconds, text):
    assert time_left(seconds) == text


def test_the_live_display_shows_the_time_left_once_it_is_known():
    out = io.StringIO()
    display = Display(Console(file=out, width=100))
    display(EVENTS[0])
    display.console.print(display.render())
    assert "left" not in out.getvalue()
    assert "42 s left" in shown(True)


def test_baselines_are_ordered_from_easy_to_hard():
    assert list(baseline_lines(EVENTS[0])) == ["uniform", "unigram", "5-gram"]


def test_sparkline_falls_with_the_loss():
    assert sparkline([4.0, 3.0, 2.0, 1.0]) == "█▅▃▁"
    assert sparkline([1.0, 1.0]) == "▁▁"


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_resumed_log_drops_what_will_be_done_again_and_torn_lines(tmp_path):
    path = tmp_path / "log.jsonl"
    with contextlib.closing(Log(path, None, 0)) as log:
        for step in (1, 5, 9):
            log(event="step", step=step)
    path.write_text(path.read_text() + '{"event": "st')  # a crash in the middle of a line
    heard = []
    with contextlib.closing(Log(path, heard.append, 5)) as log:
        log(event="step", step=6)
    assert [e["step"] for e in lines(path)] == [1, 5, 6]
    assert heard == [{"event": "step", "step": 6}]


def test_only_one_rank_writes(tmp_path):
    with contextlib.closing(Log(tmp_path / "log.jsonl", None, 0, is_main=False)) as log:
        log(event="step", step=1)
    assert not (tmp_path / "log.jsonl").exists()
