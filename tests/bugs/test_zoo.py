"""The zoo is what it says it is: each bug shows its sign, its healthy twin does not, and nothing else differs."""

import copy

import pytest
import torch
from torch import nn

from tests.bugs import probes
from tests.bugs.bug import TAXONOMY
from tests.bugs.signs import SIGNS
from tests.bugs.zoo import ZOO, by_id

each = pytest.mark.parametrize("bug", ZOO, ids=lambda b: b.id)
WEIGHTS_DIFFER = {
    *("position_row_zeroed", "loud_layer", "unscaled_init", "tied_embedding_std_1", "head_std_1"),
    *("head_not_tied", "head_not_tied_hf", "final_norm_skipped", "mlp_unregistered"),
    *("layers_multiplied", "mlp_shared", "source_table", "head_three_times"),
}
"""Bugs that lie in the weights or in what counts as one."""


def test_every_diagnosis_has_a_bug_and_every_name_is_one():
    assert len(TAXONOMY) == len(set(TAXONOMY))
    assert {bug.diagnosis for bug in ZOO} == set(TAXONOMY) == SIGNS.keys()
    assert {name for bug in ZOO for name in bug.also} <= set(TAXONOMY)
    assert len(ZOO) >= 45
    assert all(bug.diagnosis not in bug.also for bug in ZOO)


def test_ids_are_unique_and_facts_are_in_range():
    assert len({bug.id for bug in ZOO}) == len(ZOO)
    for bug in ZOO:
        assert by_id(bug.id) is bug
        assert bug.words
        assert bug.kind in ("decoder", "encoder", "seq2seq")
        assert all(1 <= number <= 80 for number in bug.catalogue)
        assert bug.layer is None or 0 <= bug.layer < len(bug.build().blocks)


@pytest.mark.sample(50)
@each
def test_the_sign_shows_in_the_sick_model_and_not_in_its_twin_of_the_same_weights(bug):
    sick, well, sign = bug.build(), bug.healthy(), SIGNS[bug.diagnosis]
    assert sick.config == well.config
    assert not sick.training
    first, second = sick.state_dict(), well.state_dict()
    same = first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert same == (bug.id not in WEIGHTS_DIFFER)
    assert sign(bug, sick) > 1e-5  # the faintest measured is 1.2e-4
    assert sign(bug, well) < 1e-9


def test_every_class_of_sick_model_can_be_copied_and_builds_the_same_again():
    for sick, bug in {type(bug.build()): bug for bug in ZOO}.items():
        twin = copy.deepcopy(bug.build())
        assert type(twin) is sick
        first, second = twin.state_dict(), bug.build().state_dict()
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.sample(13)
@pytest.mark.parametrize("bug", [b for b in ZOO if b.layer is not None], ids=lambda b: b.id)
def test_a_bug_with_a_layer_lies_in_that_block_alone(bug):
    """Repairing the block of that number, by its twin's, repairs the model (a cache's bug lies outside the blocks)."""
    sick, well = bug.build(), bug.healthy()
    if sick.cache_class is not well.cache_class:
        assert bug.diagnosis.startswith("cache_")
        return
    sick.blocks[bug.layer] = well.blocks[bug.layer]
    assert SIGNS[bug.diagnosis](bug, sick) < 1e-9


def silent_in_eval(model: nn.Module) -> float:
    return probes.future(model.double())


def silent_alone(model: nn.Module) -> float:
    return probes.cached(model.double(), 80, 1)


def silent_below_64(model: nn.Module) -> float:
    model = model.double()
    return max(probes.future(model, 60), probes.cached(model, 60, 2), probes.cached(model, 60, 2, (50, 5)))


def silent_in_single_steps(model: nn.Module) -> float:
    return probes.cached(model.double(), 40, 2, (9, 1))


def silent_without_padding(model: nn.Module) -> float:
    return max(probes.cached(model.double(), 24, 3), probes.neighbours(model))


def silent_in_float32(model: nn.Module) -> float:
    return float(probes.padded(model) > 1e-4)


def silent_without_cache(model: nn.Module) -> float:
    return max(probes.padded(model.double()), probes.cached(model))


SUBTLE = {
    "leak_in_training": silent_in_eval,
    "cache_first_row": silent_alone,
    "leak_beyond_64": silent_below_64,
    "cache_keeps_64": silent_below_64,
    "mask_offset_ends_at_64": silent_below_64,
    "dynamic_base": silent_below_64,
    "chunk_sees_itself": silent_in_single_steps,
    "window_of_the_chunk": silent_in_single_steps,
    "mask_of_first_row": silent_without_padding,
    "reorder_leaves_padding": silent_without_padding,
    "empty_rows": silent_without_padding,
    "float32_constant": silent_in_float32,
    "padding_forgotten": silent_without_cache,
    "counts_padding_when_cached": silent_without_cache,
    "trains_one_further": silent_without_cache,
    "accepts_one_more": silent_without_cache,
    "head_copied": silent_without_cache,
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("id", SUBTLE)
def test_a_subtle_bug_is_silent_outside_its_condition(id):
    assert SUBTLE[id](by_id(id).build()) < 1e-9
