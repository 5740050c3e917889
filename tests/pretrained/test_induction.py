"""The bundled induction model does what is written next to it, by the heads the lens finds; one layer cannot."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import glassformer as gf
from glassformer import pretrained
from glassformer.lens.heads import head_table, induction_score
from glassformer.lens.patch import patch, zero
from glassformer.lens.trace import trace
from glassformer.model import Model
from glassformer.training import Run, open_session, read_run, train
from glassformer.training.data.tasks import TaskData

FOLDER = pretrained.FOLDERS["induction"]
RECIPE = Path(__file__).parents[2] / "recipes" / "induction.toml"
RUN = read_run(RECIPE.read_text())


def judged(run: Run) -> tuple[Tensor, Tensor]:
    """512 rows that training never sees, and what is asked of them."""
    inputs, targets = zip(*TaskData(run.task).validation(run), strict=True)
    return torch.cat(inputs), torch.cat(targets)


def accuracy(model: Model, run: Run, ablated: dict[int, list[int]] | None = None) -> float:
    """Share of the second copy that is predicted, the values of some heads of some layers (from 0) set to zero."""
    inputs, targets = judged(run)
    edits = {f"blocks.{layer}.attention.v": zero(heads=heads) for layer, heads in (ablated or {}).items()}
    asked = targets != -100
    return float((patch(model, inputs, edits).argmax(-1) == targets)[asked].double().mean())


def scores(model: Model, run: Run) -> Tensor:
    """(L,H): mean attention from the second copy to the place after the first occurrence, on the task's own rows.

    Exactly the definition of the claim: rows where a token stands three times by chance count by the copy alone.
    """
    inputs, targets = judged(run)
    rows, places = torch.where(targets != -100)
    length = 1 + (targets != -100).sum(1)
    seen = trace(model, inputs, sites="blocks.*.attention.pattern")
    layers = range(model.config.n_layers)
    return torch.stack(
        [seen[f"blocks.{i}.attention.pattern"][rows, :, places, places - length[rows] + 1].mean(0) for i in layers]
    )


def check_two_layers(model: Model, run: Run) -> None:
    found = scores(model, run)
    assert accuracy(model, run) >= 0.95
    assert float(found[1].max()) >= 0.8
    inductive = torch.where(found[1] >= 0.5)[0].tolist()
    assert accuracy(model, run, {1: inductive}) < 0.2
    assert accuracy(model, run, {0: [0, 1]}) < 0.2


def test_it_is_under_a_megabyte_and_knows_its_recipe():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 1_000_000
    assert (FOLDER / "run.toml").read_text() == RECIPE.read_text()
    config = gf.load("induction").config
    assert (config.n_layers, config.d_model, config.n_heads, config.vocab_size) == (2, 64, 2, 40)
    assert config.feedforward == gf.config.NoFeedForward()
    assert isinstance(config.position, gf.config.QueryKeyPosition)
    assert gf.load_tokenizer("induction").decode([0, 10, 39]) == "0Ad"


def test_its_heads_do_the_work():
    check_two_layers(gf.load("induction"), RUN)


def test_what_was_measured_is_what_is_recorded():
    model, recorded = gf.load("induction"), json.loads((FOLDER / "measured.json").read_text())
    assert accuracy(model, RUN) == pytest.approx(recorded["accuracy"], abs=2e-4)
    assert accuracy(model, RUN, {1: [0, 1]}) == pytest.approx(recorded["accuracy_without_layer_2_heads"], abs=2e-4)
    assert accuracy(model, RUN, {0: [0, 1]}) == pytest.approx(recorded["accuracy_without_layer_1_heads"], abs=2e-4)
    assert scores(model, RUN).tolist() == [pytest.approx(row, abs=2e-4) for row in recorded["induction_scores"]]


def test_the_detector_of_the_lens_finds_the_same_heads():
    table = head_table(gf.load("induction"), rows=64, weights=False)
    assert ((table.score("induction") > 0.5) == (scores(gf.load("induction"), RUN) > 0.5)).all()
    assert float(table.score("previous_token")[0].max()) > 0.35
    inputs, _ = judged(RUN)
    pattern = trace(gf.load("induction"), inputs, sites="blocks.1.attention.pattern")["blocks.1.attention.pattern"]
    assert float(induction_score(pattern, inputs).max()) > 0.5


def test_a_model_that_is_not_trained_fails_every_band():
    fresh = gf.build(RUN.model)
    assert accuracy(fresh, RUN) < 0.1
    assert float(scores(fresh, RUN).max()) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_recipe_makes_such_a_model_for_every_seed_and_one_layer_does_not(tmp_path, seed):
    for layers in (2, 1):
        changes = (f"seed={seed}", f"model.n_layers={layers}", f'out="{tmp_path / str(layers)}"', "probe.every=0")
        session = open_session(read_run(RECIPE.read_text(), changes))
        model = train(session.run, session.data).model.eval()
        if layers == 2:
            check_two_layers(model, session.run)
        else:
            assert accuracy(model, session.run) <= 0.4
            assert float(scores(model, session.run).max()) <= 0.3
