"""Experiments on logits show planted bugs and not their twins."""

import pytest

from tests.doctor.reproduce.scripts import shows, shows_in

WARM = {"weights": "matrices x 6"}


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("id", "probe", "evidence"),
    [
        ("no_causal_mask", "causal_leak/future-token", {"length": 24, "cut": 10}),
        ("leak_in_training", "causal_leak/train-mode", {}),
        ("no_causal_mask", "causal_leak/with-mask", {}),
        ("target_cache_never_grows", "cache_mismatch/steps", {"rows": 2, "pieces": [3, 1, 1, 1], **WARM}),
        ("position_restarts", "decode_position/steps", {"rows": 1, "pieces": [1] * 6, **WARM}),
        ("no_mask_with_cache", "cache_mask/prompt", {"rows": 2, "pieces": [24], **WARM}),
        ("crop_keeps_position", "cache_rollback/crop", WARM),
        ("reorder_does_nothing", "cache_reorder/rows", WARM),
        ("mask_ignored", "pad_leak/content-left", {"side": "left"}),
        ("mask_ignored", "pad_leak/amount-left", {"side": "left", **WARM}),
        ("counts_padding", "left_pad_position/amount", {"side": "left", **WARM}),
        ("empty_rows", "mask_nan/float32-padded", {}),
        ("drops_in_eval", "eval_stochastic/dropout", {}),
        ("trains_one_further", "position_train_infer/modes", WARM),
        ("constant_head", "constant_logits/other-tokens", {}),
    ],
)
def test_the_script_shows_the_bug_and_not_its_twin(id, probe, evidence):
    assert shows(id, probe, **evidence)


def test_a_cache_inside_the_model_shows():
    for build, bug in (("set_up", "restarts"), ("flagged", "restarts")):
        where = f"tests.bugs.idioms.kept_caches.{build}"
        assert shows_in(bug, where, "decoder", "decode_position/steps", rows=2, pieces=[4, 1, 1, 1], **WARM)


def test_a_source_without_positions_may_be_reversed():
    build = "tests.bugs.styles.translator.build"
    assert shows_in("source_without_positions", build, "seq2seq", "position_missing/source")
