"""The induction circuit and the detector."""

import json

import pytest
import torch

from glassformer import pretrained
from glassformer.lens import zero
from glassformer.theory.claims.claim import Lab
from glassformer.theory.claims.theory import induction
from glassformer.training.run import read_run
from glassformer.weights import load


def _shipped():
    folder = pretrained.FOLDERS["induction"]
    assert folder is not None
    return load(folder), (folder / "run.toml").read_text()


def test_engine_circuit_without_bos_is_not_the_exact_one():
    assert induction._engine_pattern_error(bos=True) < 1e-5
    assert induction._engine_pattern_error(bos=False) > 0.1


def test_toy_sequence_cannot_reject_a_positional_head():
    parts = {p.id: p for p in induction._detector_parts(Lab(broken=True))}
    found = parts["a head at a fixed distance scores below 0.3"]
    assert not found.passed
    assert found.evidence["highest"] == 1.0


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_detector_holds_on_other_random_blocks(seed):
    assert all(p.passed for p in induction._detector_parts(Lab(seed)))


def test_accuracy_is_the_share_of_second_copies_and_ablation_takes_it_away():
    model, text = _shipped()
    run = read_run(text, ("loop.eval_batches=2",))
    whole = induction.accuracy(model, run)
    assert whole >= 0.95
    assert induction.accuracy(model, run, {"blocks.1.attention.heads": zero(heads=[])}) == whole
    assert induction.accuracy(model, run, {"blocks.*.attention.heads": zero()}) < 0.1


def test_scores_on_the_tasks_rows_are_those_recorded_with_the_model():
    model, text = _shipped()
    folder = pretrained.FOLDERS["induction"]
    recorded = json.loads((folder / "measured.json").read_text())["induction_scores"]
    found = induction.copy_scores(model, read_run(text))
    torch.testing.assert_close(found, torch.tensor(recorded), atol=2e-4, rtol=0)


def test_training_in_memory_repeats_itself_and_follows_the_recipe():
    _, text = _shipped()
    short = text.replace("steps = 800", "steps = 3")
    model, run = induction.trained(short, 1, 5)
    induction.trained.cache_clear()
    again, _ = induction.trained(short, 1, 5)
    assert (model.config.n_layers, run.seed, run.loop.steps) == (1, 5, 3)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_two_layers_learn_induction_and_one_does_not():
    parts = list(induction.induction_head_detection(Lab(slow=True)))
    assert [p.text() for p in parts if not p.passed] == []
    assert sum(p.id.startswith("two layers") for p in parts) == 4 * induction.SEEDS
