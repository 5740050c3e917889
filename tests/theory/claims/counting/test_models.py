"""Counts of whole models."""

from hypothesis import given, settings
from hypothesis import strategies as st

from glassformer.config import presets
from glassformer.theory.claims.claim import Lab
from glassformer.theory.claims.counting import models


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 500), st.integers(1, 40), st.integers(1, 4), st.integers(1, 100))
def test_formula_counts_any_model_of_that_shape(vocab, d, layers, context):
    changes = {"d_model": d, "n_layers": layers, "n_heads": 1, "max_len": context, "d_ff": 4 * d}
    assert models.gpt2_formula(vocab, d, layers, context) == models.built(presets.gpt2(vocab_size=vocab, **changes))
    encoder = presets.bert_large(vocab_size=vocab, **changes)
    assert models.bert_formula(vocab, d, layers, context)[2] == models.built(encoder) + 2 * d + 2


def test_evidence_has_every_stated_number():
    gpt2 = {p.id: p.evidence for p in models.gpt2_small_param_count(Lab())}
    assert gpt2["gpt2"]["engine"] == 124_439_808
    assert gpt2["untied"]["engine"] == 163_037_184
    bert = {p.id: p.evidence for p in models.bert_large_param_count(Lab())}
    assert bert["V = 30,000"]["engine"][1] == 334_607_360
    assert bert["V = 30,522"]["engine"][1] == 335_141_888


def test_fixed_positions_change_every_total_of_bert():
    failed = [p.id for p in models.bert_large_param_count(Lab(broken=True)) if not p.passed]
    assert failed == ["V = 30,000", "V = 30,522", "V = 28,996", "every term"]
