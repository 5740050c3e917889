"""A run's log becomes curves: losses, baselines, and the probes' scores."""

import json

import pytest

from glassformer.lens.figures import FigureError, training_curves
from glassformer.lens.figures.training import losses_of, probe_series, read_log
from tests.lens.figures.cases import log


def test_losses_and_baselines_are_drawn_as_logged():
    figure = training_curves(log())
    (ax,) = figure.axes
    training, validation, *lines = ax.lines
    events = log()
    assert list(training.get_ydata()) == [e["loss"] for e in events if e["event"] == "step"]
    assert list(validation.get_xdata()) == [e["step"] for e in events if e["event"] == "validation"]
    assert [text.get_text() for text in ax.get_legend().get_texts()][2:] == [
        "uniform: 4.174",
        "unigram: 3.300",
        "bigram: 2.500",
    ]
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("losses", "uniform", "low", "high"),
    [((6.9, 4.6), 6.9, 4.6, 6.9), ((3.0, 0.01), 3.7, 0.01, 3.7), ((2.0, 2.0), 2.0, 2.0, 2.0)],
)
def test_the_axis_of_the_loss_is_that_of_the_data(losses, uniform, low, high):
    events = [{"event": "start", "uniform": uniform, "baselines": {}}]
    events += [{"event": "step", "step": i, "loss": loss} for i, loss in enumerate((*losses, float("nan")))]
    bottom, top = training_curves(events).canvas.axes[0].get_ylim()
    margin = 0.1 * (high - low) or 0.5
    assert max(0, low - margin) <= bottom <= low < high + 1e-9
    assert high <= top <= high + margin


def test_probes_give_the_best_head_on_a_second_panel():
    figure = training_curves(log(probes=True))
    series = probe_series(log(probes=True))
    assert series["induction (largest)"][1][-1] == pytest.approx(0.975)
    assert series["norms total"][1][0] == 30.0
    shown = [line.get_label() for line in figure.axes[1].lines]
    assert shown == ["induction (largest)", "previous token (largest)"]  # norms are no score


def test_a_log_is_read_from_a_run_and_a_torn_line_is_left_out(tmp_path):
    lines = [json.dumps(event) for event in log()]
    (tmp_path / "log.jsonl").write_text("\n".join(lines) + '\n{"event": "step", "st')
    assert read_log(tmp_path) == log()
    assert losses_of(read_log(tmp_path / "log.jsonl")) == losses_of(log())
    assert training_curves(tmp_path).title


def test_no_log_and_an_empty_one_are_one_sentence(tmp_path):
    with pytest.raises(FigureError, match=r"log\.jsonl cannot be read"):
        training_curves(tmp_path)
    with pytest.raises(FigureError, match="train for at least one step first"):
        training_curves([{"event": "start"}])
