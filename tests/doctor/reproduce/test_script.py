"""A script stands alone: it is run in a process of its own, and needs nothing of this package."""

import dataclasses

import pytest

import glassformer as gf
from glassformer.doctor.reproduce import reproduce, runs
from tests.doctor.reproduce.scripts import exit_code, finding, script_for

FILE = """
import torch
from torch import nn


class Leaky(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(23, 16), nn.Linear(16, 23)

    def forward(self, idx):
        x = self.table(idx)
        return self.head(x + x.mean(1, keepdim=True))
"""


def test_a_script_from_a_report_runs_alone_and_shows_the_defect(tmp_path, monkeypatch):
    (tmp_path / "leaky_model.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    from leaky_model import Leaky

    model = Leaky()
    report = gf.diagnose(model, kind="decoder", quick=True)
    source = f"sys.path.insert(0, {str(tmp_path)!r})\nfrom leaky_model import Leaky\nmodel = Leaky()"
    (script,) = reproduce(report, model, source)
    assert "glassformer" not in script.text
    assert runs(script)


def test_a_script_of_a_sound_model_shows_nothing():
    _, well = script_for("no_causal_mask", finding("causal_leak/future-token"))
    assert exit_code(well) == 0


@pytest.mark.parametrize(
    ("text", "shows"),
    [
        ("print('defect')\nraise SystemExit(1)", True),
        ("print('no defect')\nraise SystemExit(1)", False),
        ("print('defect')", False),
        ("print('defect')\nraise SystemExit(2)", False),
    ],
)
def test_a_script_shows_a_defect_by_its_exit_code_and_its_last_line(text, shows):
    script, _ = script_for("no_causal_mask", finding("causal_leak/future-token"))
    assert runs(dataclasses.replace(script, text=text)) == shows


def test_warm_weights_are_written_into_the_script():
    sick, _ = script_for("no_causal_mask", finding("causal_leak/future-token", weights="matrices x 6"))
    assert "p.mul_(6)" in sick.text


def test_a_diagnosis_without_an_experiment_has_no_script():
    with pytest.raises(AssertionError, match="attn_scale"):
        script_for("scale_missing", finding("attn_scale/ratio"))
