"""Logits against a record: a pass for the same model, a failure for another, a skip without a record."""

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file

from glassformer import config as c
from glassformer.finding import Verdict
from glassformer.model import build
from glassformer.weights import WeightsError, compare_logits, load, record_reference, verify_folder
from glassformer.weights.verify import same_logits
from tests.variants import decoder, seq2seq
from tests.weights.test_gpt2 import config
from tests.weights.test_t5 import make
from tests.weights.tiny import batch, edit, random_model, saved


@torch.no_grad()
def test_folder_with_a_record_from_transformers(tmp_path):
    model = random_model(hf.GPT2LMHeadModel, config())
    folder = saved(model, tmp_path)
    assert verify_folder(folder).verdict is Verdict.SKIP
    tokens, mask, positions = batch("left")
    record_reference(
        folder, tokens, model(tokens, attention_mask=mask.long(), position_ids=positions).logits, mask=mask
    )
    finding = verify_folder(folder)
    assert finding.passed
    assert 0 < finding.measured <= 1e-4
    assert finding.evidence["logits_compared"] == 22 * 97
    edit(folder, layer_norm_epsilon=0.5)
    assert verify_folder(folder).verdict is Verdict.FAIL


@torch.no_grad()
def test_encoder_decoder_with_a_record(tmp_path):
    model = make("v1.0")
    folder = saved(model, tmp_path / "t5")
    source, target = batch("none")[0], batch("none", seed=2)[0]
    file = record_reference(tmp_path / "r.safetensors", source, model(source, decoder_input_ids=target).logits, target)
    assert verify_folder(folder, file).passed
    record_reference(tmp_path / "r.safetensors", source, torch.zeros(3, 11, 97))
    with pytest.raises(WeightsError, match="target"):
        verify_folder(folder, file)


def test_a_record_of_something_else(tmp_path):
    folder = saved(random_model(hf.GPT2LMHeadModel, config()), tmp_path)
    save_file({"tokens": torch.zeros(1, 2, dtype=torch.long)}, folder / "reference.safetensors")
    with pytest.raises(WeightsError, match="logits"):
        verify_folder(folder)
    record_reference(folder, torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 2, 5))
    with pytest.raises(WeightsError, match="cannot be compared"):
        verify_folder(folder)


def test_comparison_measures_the_largest_difference_of_real_places():
    ours, reference = torch.zeros(1, 3, 2), torch.tensor([[[0.0, 1e-5], [0.0, 0.0], [9.0, 9.0]]])
    mask = torch.tensor([[True, True, False]])
    finding = compare_logits("x", ours, reference, 1e-4, "a reason", mask)
    assert finding.passed
    assert finding.measured == pytest.approx(1e-5)
    assert not compare_logits("x", ours, reference, 1e-4, "a reason").passed
    assert not compare_logits("x", ours * float("nan"), reference, 1e-4, "a reason").passed


def test_a_model_in_hand_is_used(tmp_path):
    model = random_model(hf.GPT2LMHeadModel, config())
    folder = saved(model, tmp_path)
    tokens = batch("none")[0]
    with torch.no_grad():
        record_reference(folder, tokens, model(tokens).logits.double())
    assert verify_folder(folder, model=load(folder, dtype="float64"), bound=1e-4).passed


def test_same_logits_is_exact_and_notices_one_changed_weight():
    for spec in (decoder(), seq2seq(), c.replace(decoder(), head=None)):
        model, twin = build(spec), build(spec)
        assert same_logits(model, twin).passed
        with torch.no_grad():
            twin.embed.tokens.weight.mul_(1.001)
        assert not same_logits(model, twin).passed
