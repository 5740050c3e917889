"""The bundled model is small, comes with its recipe, and has the loss that is written next to it."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import glassformer as gf
from glassformer import pretrained
from glassformer.training.data import tokenizer
from glassformer.training.data.batches import eval_batches

FOLDER = pretrained.FOLDERS["bard"]
TEXT = Path(os.environ.get("GLASSFORMER_DATA") or "nowhere") / "tinyshakespeare.txt"


def test_it_is_at_most_four_megabytes_and_knows_its_recipe():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 4_000_000
    recipe = Path(__file__).parents[2] / "recipes" / "bard.toml"
    assert (FOLDER / "run.toml").read_text() == recipe.read_text()


def test_it_is_found_by_name_and_nothing_else_is():
    assert gf.load("bard").config.vocab_size == 65
    assert "homer" not in pretrained.FOLDERS
    assert "../weights" not in pretrained.FOLDERS


@pytest.mark.slow
@pytest.mark.parametrize("name", pretrained.NAMES)
def test_the_doctor_finds_the_bundled_models_healthy_as_they_are_stored(name):
    report = gf.diagnose(gf.load(name), quick=True)
    assert report.healthy, report.text()


@pytest.mark.slow
@pytest.mark.skipif(not TEXT.exists(), reason="the Shakespeare corpus is not here: set GLASSFORMER_DATA")
@torch.no_grad()
def test_its_loss_is_the_recorded_one():
    model, words = gf.load("bard", dtype="float32"), tokenizer.load(FOLDER)
    ids = words.encode(TEXT.read_text(encoding="utf-8"))
    validation = ids[int(0.9 * len(ids)) :]
    total, count = 0.0, 0
    for inputs, targets in eval_batches(np.asarray(validation), 256, 32):
        total += F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum").item()
        count += int((targets != -100).sum())
    recorded = json.loads((FOLDER / "measured.json").read_text())["validation_loss"]
    assert total / count == pytest.approx(recorded, abs=1e-4)
    assert recorded < 1.5789  # the 5-gram line
