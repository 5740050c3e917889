import pytest

import glassformer as gf
from glassformer import sizing
from glassformer.config import to_dict

SMALL = {"kind": "dense", "d_ff": 4}


@pytest.mark.parametrize("preset", ["gpt2", "mixtral_8x7b", "t5_small", "bert_base"])
def test_the_sheet_is_the_librarys(ask, preset):
    response = ask("size", preset=preset, batch=3, context=100, dtype="bfloat16")
    assert response == gf.size(gf.presets.get(preset), 3, 100, "bfloat16").to_dict()


def test_a_model_of_the_shelf_and_a_config_of_ones_own(ask, models):
    config = models.get("tiny").config
    assert ask("size", model="tiny") == gf.size(config).to_dict()
    assert ask("size", config=to_dict(config)) == gf.size(config).to_dict()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_layers": 10**6}, "layers"),
        ({"n_layers": 10**9}, "too large"),
        ({"vocab_size": 10**12}, "too large"),
        ({"d_model": "x"}, "wrong type"),
        ({"attention": {"n_heads": [1]}}, "wrong type"),
        ({"nonsense": 1}, "not a field"),
        ({"feedforward": {"kind": "moe", "n_experts": 5000, "n_active": 1, "expert": SMALL}}, "expert"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_is_refused_in_words(ask, models, change, words):
    status, sentence = ask.refused("size", config={**to_dict(models.get("tiny").config), **change})
    assert status in (400, 422)
    assert words in sentence


def test_chinchilla_is_the_librarys_and_its_curves_have_their_lowest_point_at_the_optimum(client):
    response = client.get("/api/size/chinchilla?flops=1.2e24").json()
    wanted = sizing.chinchilla(flops=1.2e24).to_dict()
    assert {key: response[key] for key in wanted} == wanted
    for curve in response["curves"]:
        (best,) = [row for row in wanted["allocations"] if row["method"] == curve["method"]]
        assert min(curve["loss"]) == pytest.approx(best["loss"])
        assert curve["loss"].index(min(curve["loss"])) == 15


@pytest.mark.parametrize(
    "query", ["", "flops=nan", "flops=-1", "flops=1e300", "flops=x", "flops=1&params=1", "a=1", "flops=inf"]
)
def test_an_invalid_budget_is_refused_in_a_sentence(client, query):
    reply = client.get(f"/api/size/chinchilla?{query}")
    assert reply.status_code in (400, 422)
    assert reply.json()["error"].endswith(".")


def test_presets_are_listed_with_their_parameters(client):
    rows = {row["name"]: row["parameters"] for row in client.get("/api/size/presets").json()["presets"]}
    assert rows["gpt2"] == 124_439_808
    assert set(rows) == set(gf.presets.ALL)
