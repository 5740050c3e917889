"""Calls are written as the model takes them."""

from types import SimpleNamespace

import torch

from glassformer.doctor.probes import subject_of
from glassformer.doctor.reproduce.calls import FIELDS, Calls, accessor
from tests.bugs.styles import hugging, nano, pair


def test_logits_are_taken_from_what_the_model_returns():
    logits = torch.zeros(2, 3, 4)
    assert accessor(logits, logits, FIELDS) == ""
    assert accessor({"logits": logits}, logits, FIELDS) == '["logits"]'
    assert accessor(SimpleNamespace(logits=logits), logits, FIELDS) == ".logits"
    assert accessor((None, logits), logits, FIELDS) == "[1]"
    assert accessor((None,), logits, FIELDS) is None


def test_the_styles_are_called_as_they_want():
    assert Calls(subject_of(nano.build(), kind="decoder")).logits().endswith("model(tokens, **given)[0]")
    calls = Calls(subject_of(hugging.build(), kind="decoder"))
    assert calls.logits().endswith("model(tokens, use_cache=False, **given).logits")
    assert "past_key_values=cache, use_cache=True" in calls.cached()
    assert "cache = result.past_key_values" in calls.cached()
    calls = Calls(subject_of(pair.build(), kind="seq2seq"))
    assert "model(source, tgt=tokens, **given)" in calls.logits()
    assert calls.cached() is None
    assert calls.mask("real").startswith("(real).to(torch.")
