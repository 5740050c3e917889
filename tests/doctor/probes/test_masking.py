"""Padding is invisible: content, amount, side, cache, precision."""

import pytest

from glassformer.doctor.probes import masking
from glassformer.finding import Verdict
from tests.doctor.probes.subjects import BUGS, bert, buggy, failures, gpt2, names, rotary, t5


@pytest.mark.parametrize("make", [gpt2, rotary, bert, t5])
def test_correct_models_do_not_see_padding(make):
    subject = make()
    assert failures(masking.padding_is_invisible(subject)) == []
    assert failures(masking.nothing_is_nan(subject)) == []
    assert failures(masking.padding_constant(subject)) == []


@pytest.mark.parametrize(
    "id",
    ["mask_ignored", "mask_ignored_one_layer", "right_padding_assumed", "queries_masked", "source_mask_ignored",
     "padding_forgotten", "counts_padding", "counts_padding_when_cached", "mask_of_first_row"],
)  # fmt: skip
def test_each_fault_of_padding_has_its_own_name(id):
    assert names(masking.padding_is_invisible(buggy(id))) == {BUGS[id].diagnosis}


@pytest.mark.parametrize(("id", "where"), [("empty_rows", "float32-padded"), ("float32_constant", "bfloat16-padded")])
def test_nan_is_found_where_it_arises(id, where):
    assert f"mask_nan/{where}" in failures(masking.nothing_is_nan(buggy(id)))


def test_a_padding_constant_is_read_from_the_scores():
    assert failures(masking.padding_constant(buggy("mask_minus_1e4"))) == ["mask_value/padding"]


def test_absolute_positions_of_a_library_are_a_note_and_no_disease():
    transformers = pytest.importorskip("transformers")
    from glassformer.doctor.probes import subject_of

    config = transformers.GPT2Config(
        vocab_size=61, n_embd=32, n_layer=1, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    findings = list(masking.padding_is_invisible(subject_of(transformers.GPT2LMHeadModel(config))))
    assert names(findings) == set()
    note = next(f for f in findings if f.id == "left_pad_position/without-positions")
    assert note.verdict is Verdict.SKIP
    assert note.evidence["explained"]
