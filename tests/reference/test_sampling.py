"""The exact next-token distribution: against transformers' warpers, and by hand where there are ties."""

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from glassformer.reference import distribution


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 4, 100])
@pytest.mark.parametrize("top_p", [0.3, 0.8, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.2])
def test_filters_in_order_equal_transformers_warpers(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    generator = np.random.default_rng(0)
    for _ in range(5):
        logits, context = 2 * generator.standard_normal(17), generator.integers(0, 17, 6)
        warpers = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3), TemperatureLogitsWarper(temperature)])
        if top_k:
            warpers.append(TopKLogitsWarper(top_k))
        if top_p < 1:
            warpers.append(TopPLogitsWarper(top_p))
        warpers.append(MinPLogitsWarper(min_p))
        theirs = warpers(torch.tensor(context)[None], torch.tensor(logits)[None]).softmax(-1)[0].numpy()
        ours = distribution(logits, temperature, top_k, top_p, min_p, 1.3, context)
        np.testing.assert_array_equal(ours > 0, theirs > 0)
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=0)


def test_no_filter_is_softmax() -> None:
    np.testing.assert_allclose(distribution(np.log([0.2, 0.5, 0.3])), [0.2, 0.5, 0.3], rtol=1e-15)


def test_temperature_zero_puts_all_mass_on_the_lowest_of_equal_ids() -> None:
    np.testing.assert_array_equal(distribution([1.0, 3.0, 3.0], temperature=0), [0, 1, 0])


def test_top_k_keeps_ties_with_the_kth_as_transformers_does() -> None:
    logits = [0.0, 2.0, 1.0, 1.0, -1.0]
    kept = distribution(logits, top_k=2) > 0
    np.testing.assert_array_equal(kept, [False, True, True, True, False])
    theirs = TopKLogitsWarper(2)(torch.zeros(1, 1, dtype=torch.long), torch.tensor([logits]))[0]
    np.testing.assert_array_equal(kept, torch.isfinite(theirs).numpy())


def test_top_p_keeps_the_smallest_sufficient_set_ties_by_lowest_id() -> None:
    probabilities = np.array([0.125, 0.25, 0.25, 0.25, 0.125])
    kept = [distribution(np.log(probabilities), top_p=p) > 0 for p in (0.0, 0.24, 0.26, 0.49, 0.76)]
    np.testing.assert_array_equal(kept[0], [False, True, False, False, False])
    np.testing.assert_array_equal(kept[1], [False, True, False, False, False])
    np.testing.assert_array_equal(kept[2], [False, True, True, False, False])
    np.testing.assert_array_equal(kept[3], [False, True, True, False, False])
    np.testing.assert_array_equal(kept[4], [True, True, True, True, False])


def test_top_p_stops_as_soon_as_the_total_equals_p() -> None:
    np.testing.assert_array_equal(distribution(np.zeros(4), top_p=0.5), [0.5, 0.5, 0, 0])


def test_top_p_reads_the_renormalised_result_of_top_k() -> None:
    """0.4, 0.35 of 1 become 0.533, 0.467 after top_k = 2: a p of 0.5 is then reached by the first alone."""
    logits = np.log([0.4, 0.35, 0.25])
    np.testing.assert_array_equal(distribution(logits, top_k=2, top_p=0.5), [1, 0, 0])
    assert (distribution(logits, top_p=0.5)[:2] > 0).all()


def test_repetition_penalty_lowers_positive_and_negative_logits_once() -> None:
    expected = np.exp([1.0, -2.0, 0.5])
    np.testing.assert_allclose(
        distribution([2.0, -1.0, 0.5], repetition_penalty=2.0, context=[0, 1, 1]), expected / expected.sum(), rtol=1e-14
    )


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 1.5}, {"min_p": -0.1}, {"repetition_penalty": 0.0}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_refusals_name_the_setting(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        distribution([1.0, 2.0], **wrong)


def test_refuses_a_batch_of_logits() -> None:
    with pytest.raises(ValueError, match="shape"):
        distribution([[1.0, 2.0]])
