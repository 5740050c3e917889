"""Samplers and cache timings of the tour. tests/tour/test_run.py samples from a trained model."""

import dataclasses

from glassformer.tour import generation


def test_timings_agree_and_different_tokens_are_a_failure():
    short, long = generation.time_cache((4, 16))
    assert short.same_tokens
    assert long.same_tokens
    assert long.speed_up > 0
    assert generation.cached_equals_recomputed([short, long]).passed
    different = dataclasses.replace(long, same_tokens=False)
    assert not generation.cached_equals_recomputed([short, different]).passed


def test_samplers_show_distributions():
    rows = {row.name: row for row in generation.sampler_distributions()}
    assert all(abs(sum(row.probabilities) - 1) < 1e-12 for row in rows.values())
    assert rows["greedy"].kept == 1
    assert rows["top-k 4"].kept == 4
    assert rows["temp 0.5"].entropy < rows["temp 1"].entropy < rows["temp 2"].entropy
    assert rows["penalty 2"].probabilities[2] < rows["temp 1"].probabilities[2]


def test_a_batch_that_changes_a_sequence_is_a_failure(monkeypatch):
    assert generation.batched_equals_single().passed
    honest = generation.generate
    monkeypatch.setattr(
        generation, "generate", lambda model, prompts, *a, **k: [row[::-1] for row in honest(model, prompts, *a, **k)]
        if len(prompts) > 1 else honest(model, prompts, *a, **k),
    )  # fmt: skip
    assert not generation.batched_equals_single().passed
