import pytest
import torch

import glassformer as gf
from glassformer.studio import schema
from glassformer.studio.api.inputs import read_inputs, top_tokens
from glassformer.studio.errors import StudioError


def test_a_text_and_its_ids_are_read_alike(models):
    by_text = read_inputs(models, schema.TextRequest(model="bard", text="To be"))
    by_ids = read_inputs(models, schema.TextRequest(model="bard", ids=by_text.ids))
    assert by_text.ids == by_ids.ids
    assert by_text.token_texts == list("To be")


def test_an_encoder_decoder_answers_itself_when_no_target_is_given(models):
    reading = read_inputs(models, schema.TextRequest(model="pair", ids=[3, 1, 4]))
    assert reading.target == gf.generate(models.get("pair").model, [[3, 1, 4]], 24)[0]
    given = read_inputs(models, schema.TextRequest(model="pair", ids=[3, 1, 4], target=[0, 5]))
    assert torch.equal(given.trace_arguments["target"], torch.tensor([[0, 5]]))


def test_a_model_of_one_stack_has_no_target(models):
    with pytest.raises(StudioError, match="leave target out"):
        read_inputs(models, schema.TextRequest(model="bard", ids=[1], target=[1]))


def test_top_tokens_are_the_most_likely(models):
    logits = torch.randn(65)
    rows = top_tokens(models.get("bard"), logits, 5)
    assert [row["id"] for row in rows] == logits.topk(5).indices.tolist()
    assert rows[0]["p"] == pytest.approx(float(logits.double().softmax(-1).max()), abs=1e-15)
    assert len(top_tokens(models.get("bard"), logits, 1000)) == 65
