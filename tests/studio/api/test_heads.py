import numpy as np
import pytest
import torch

from glassformer.lens import mean, patch, trace, zero
from glassformer.lens.heads import head_table
from glassformer.studio import schema
from glassformer.studio.api.heads import patterns
from glassformer.studio.errors import TooLargeError

IDS = [18, 47, 56, 57, 58, 1]


def test_patterns_are_those_of_trace_to_a_byte(ask, models):
    arrays, meta = ask.tensors("patterns", model="bard", ids=IDS)
    site = "blocks.*.attention.pattern"
    wanted = trace(models.get("bard").model, [IDS], sites=site).stack(site)[:, 0].numpy()
    assert arrays["pattern"].shape == (6, 5, 6, 6)
    assert np.abs(arrays["pattern"] - wanted).max() <= 0.5 / 255 + 1e-6
    assert meta["pieces"] == list("First ")


def test_one_layer_can_be_asked_for(ask):
    arrays, _ = ask.tensors("patterns", model="bard", ids=IDS, layer=3)
    every, _ = ask.tensors("patterns", model="bard", ids=IDS)
    assert np.array_equal(arrays["pattern"][0], every["pattern"][3])
    assert "layers are 0 to 5" in ask.refused("patterns", model="bard", ids=IDS, layer=6)[1]


@pytest.mark.parametrize(
    ("where", "site"),
    [
        ("self", "decoder.blocks.*.attention.pattern"),
        ("cross", "decoder.blocks.*.cross.pattern"),
        ("encoder", "encoder.blocks.*.attention.pattern"),
    ],
)
def test_an_encoder_decoder_has_three_kinds_of_attention(ask, models, where, site):
    arrays, meta = ask.tensors("patterns", model="pair", ids=[1, 2, 3, 4], target=[0, 5], where=where)
    run = trace(models.get("pair").model, [[1, 2, 3, 4]], target=[[0, 5]], sites=site)
    assert np.allclose(arrays["pattern"], run.stack(site)[:, 0].numpy(), atol=0.002 + 1e-6)
    assert len(meta["keys"]) == arrays["pattern"].shape[3]
    assert "needs an encoder-decoder" in ask.refused("patterns", model="bard", ids=IDS, where="cross")[1]


def test_too_many_are_refused_before_they_are_computed(models):
    with pytest.raises(TooLargeError, match="select one layer"):
        patterns(models, schema.Patterns(model="bard", ids=[1] * 100), limit=1000)


def test_scores_are_those_of_the_head_table(ask, models):
    response = ask("heads", model="induction", seed=1)
    table = head_table(models.get("induction").model, seed=1)
    assert [(row["layer"], row["head"]) for row in response["rows"]] == [(r.layer, r.head) for r in table.rows]
    assert response["rows"][3]["scores"] == table.rows[3].scores
    assert response["notes"] == table.notes


@pytest.mark.parametrize(("mode", "make"), [("zero", zero), ("mean", mean)])
def test_ablation_is_that_of_patch(ask, models, mode, make):
    model = models.get("bard").model
    response = ask("ablate", model="bard", ids=IDS, heads=[[0, 1], [0, 3], [4, 2]], mode=mode, top=65)
    edits = {"blocks.0.attention.heads": make(heads=[1, 3]), "blocks.4.attention.heads": make(heads=[2])}
    after = patch(model, [IDS], edits)[0, -1].double().softmax(-1)
    for row in response["after"]:
        assert row["p"] == pytest.approx(float(after[row["id"]]), abs=1e-6)
    before = model(torch.tensor([IDS]))[0, -1].double().softmax(-1)
    assert response["kl"] == pytest.approx(float((before * (before.log() - after.log())).sum().detach()), abs=1e-6)
    assert response["kl"] > 0.01


def test_without_heads_nothing_changes(ask):
    response = ask("ablate", model="bard", ids=IDS, heads=[])
    assert response["kl"] == pytest.approx(0, abs=1e-12)
    assert "head 6.0 does not exist" in ask.refused("ablate", model="bard", ids=IDS, heads=[[6, 0]])[1]
