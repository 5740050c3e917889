import math

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from glassformer.lens import sites_of, trace
from glassformer.studio import schema
from glassformer.studio.api import cell as module
from glassformer.studio.api.cell import cell
from glassformer.studio.errors import StudioError
from glassformer.studio.models import LoadedModel
from tests import variants
from tests.sampled import examples

IDS, TARGET = [3, 1, 4, 1, 5], [2, 7, 1, 8]


class OneModel:
    """A models with one model on it."""

    def __init__(self, model):
        self.loaded = LoadedModel("m", None, model, None)

    def get(self, name):
        return self.loaded


@pytest.mark.slow
@hypothesis.settings(max_examples=examples(25))
@hypothesis.given(variants.decoders | variants.encoders | variants.seq2seqs, st.integers(0, 10**6))
def test_the_terms_make_the_value_at_every_site_of_every_variant(config, number):
    """In float64 the shown arithmetic gives the model's own number; what cannot be shown is reported, never wrong."""
    model, _ = variants.lively(config)
    target = TARGET if config.kind == "seq2seq" else None
    models, shown = OneModel(model), 0
    given_ = {} if target is None else {"target": [target]}
    run = trace(model, [IDS], **given_)
    for site in list(sites_of(model))[number % 3 :: 3]:  # a third of them: each cell is a run of its own
        value = run[site][0]
        index = [int(number // 7**axis) % size for axis, size in enumerate(value.shape)]
        asked = schema.Cell(model="m", ids=IDS, target=target, site=site, index=index)
        try:
            response = cell(models, asked)
        except StudioError:
            continue
        shown += 1
        held = float(value[tuple(index)])
        if math.isinf(held):
            assert response["value"] is None
            assert "minus infinity" in response["note"]
            continue
        assert response["value"] == pytest.approx(held, abs=1e-10)  # another path rounds otherwise
        assert response["computed"] == pytest.approx(held, abs=1e-9, rel=1e-9), site
        total = sum(term["product"] for term in response["terms"]) + response["rest"]
        if not site.endswith("pattern"):
            assert response["scale"] * total + sum(response["added"].values()) == pytest.approx(held, abs=1e-9), site
        assert response["n_terms"] == len(response["terms"])
    assert shown >= 3


@pytest.mark.parametrize(
    "site", ["blocks.0.attention.q", "blocks.5.attention.out", "logits", "blocks.2.feedforward.post"]
)
def test_a_cell_of_the_bard_is_answered(ask, models, site):
    run = trace(models.get("bard").model, [IDS], sites=site)
    index = [1] * (run[site].dim() - 1)
    response = ask("cell", model="bard", ids=IDS, site=site, index=index)
    assert response["computed"] == pytest.approx(float(run[site][0][tuple(index)]), abs=1e-4)
    assert response["mathml"].startswith("<math")


def test_an_index_outside_is_refused(ask):
    body = {"model": "bard", "ids": IDS, "site": "embed"}
    assert "outside embed" in ask.refused("cell", index=[5, 0], **body)[1]
    assert "outside embed" in ask.refused("cell", index=[0], **body)[1]
    assert ask.refused("cell", index=[-1, 0], **body)[0] == 422


def test_many_terms_are_cut_to_the_largest_and_the_rest_is_one_number():
    numbers = torch.arange(module.MAX_TERMS + 100, dtype=torch.float64)
    response = module.Arithmetic("x", numbers, torch.ones_like(numbers), list(map(str, numbers))).to_dict()
    assert len(response["terms"]) == module.MAX_TERMS
    assert response["rest"] == sum(range(100))
    assert response["computed"] == float(numbers.sum())
