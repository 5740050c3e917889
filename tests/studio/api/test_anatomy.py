import hypothesis
import numpy as np
import pytest

import glassformer as gf
from glassformer.config import presets
from glassformer.lens import sites_of, trace
from glassformer.sizing import count, flops
from glassformer.studio.api.anatomy import describe
from tests import variants
from tests.sampled import examples

SMALL = [name for name in presets.ALL if count(presets.get(name)) < 2e9]


@pytest.mark.parametrize("name", SMALL)
def test_parts_add_up_to_the_size_sheet(name):
    config = presets.get(name)
    response = describe(config)
    assert sum(part["parameters"] for part in response["parts"]) == count(config) == response["totals"]["parameters"]
    context = response["totals"]["context"]
    work = flops(config, 1, context).total_forward / context
    assert sum(part["flops_per_token"] for part in response["parts"]) == work


@hypothesis.settings(max_examples=examples(40))
@hypothesis.given(variants.decoders | variants.encoders | variants.seq2seqs)
def test_of_every_variant_parts_add_up_and_sites_exist(config):
    response = describe(config)
    assert sum(part["parameters"] for part in response["parts"]) == count(config)
    assert response["totals"]["flops_per_token"] * response["totals"]["context"] == response["totals"]["forward_flops"]
    known = sites_of(config)
    for part in response["parts"]:
        assert part["site"] in known, part["path"]
        assert part["path"] == "pooler" or part["letters"] == known[part["site"]].letters
    paths = [part["path"] for part in response["parts"]]
    assert len(set(paths)) == len(paths)


def test_anatomy_is_answered_by_name(ask):
    response = ask("anatomy", model="bard")
    assert response["letters"]["D"] == 160
    assert all(part["mathml"].startswith("<math") for part in response["parts"])


@pytest.mark.sample(2)
@pytest.mark.parametrize("model", ["bard", "both", "pair"])
def test_a_tensor_is_what_trace_records(ask, models, model):
    loaded = models.get(model)
    given = {"target": [[0, 3, 5]]} if model == "pair" else {}
    body = {"target": [0, 3, 5]} if model == "pair" else {}
    run = trace(loaded.model, [[1, 2, 3, 4]], **given)
    for site in list(run)[:: 3 if model == "bard" else 1]:
        arrays, meta = ask.tensors("tensor", model=model, ids=[1, 2, 3, 4], site=site, **body)
        wanted = run[site][0].numpy()
        assert np.allclose(arrays["value"], wanted, atol=1e-5, rtol=1e-3), site
        assert len(meta["letters"].split(",")) == wanted.ndim


def test_one_head_can_be_asked_for(ask, models):
    site = "blocks.1.attention.scores"
    run = gf.trace(models.get("bard").model, [[1, 2, 3]], sites=site)
    arrays, meta = ask.tensors("tensor", model="bard", ids=[1, 2, 3], site=site, head=2)
    assert np.allclose(arrays["value"], run[site][0, 2].numpy(), rtol=1e-3)
    assert meta["letters"] == "T,S"


def test_a_site_that_does_not_exist_is_named(ask):
    body = {"model": "bard", "ids": [1, 2]}
    assert "layers are 0 to 5" in ask.refused("tensor", site="blocks.9.resid_pre", **body)[1]
    assert "is not a site" in ask.refused("tensor", site="<script>", **body)[1]
    assert "matches 6 sites" in ask.refused("tensor", site="blocks.*.resid_pre", **body)[1]
    assert "no head axis" in ask.refused("tensor", site="embed", head=0, **body)[1]
    assert "does not exist" in ask.refused("tensor", site="blocks.0.attention.q", head=5, **body)[1]


def test_the_error_of_a_large_tensor_names_what_to_narrow(models):
    from glassformer.studio import schema
    from glassformer.studio.api.anatomy import tensor
    from glassformer.studio.errors import TooLargeError

    request = schema.TensorRequest(model="bard", ids=[1] * 50, site="blocks.0.attention.pattern")
    with pytest.raises(TooLargeError, match="select one head"):
        tensor(models, request, limit=10_000)
    with pytest.raises(TooLargeError, match="fewer tokens"):
        tensor(models, schema.TensorRequest(model="bard", ids=[1] * 50, site="embed"), limit=10_000)
