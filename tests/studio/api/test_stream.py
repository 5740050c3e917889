import pytest
import torch

from glassformer.lens import attribute_logits, logit_lens, patch_effects, rank, stream_norms

IDS = [18, 47, 56, 57, 58, 1]


def test_the_lens_is_the_librarys(ask, models):
    response = ask("lens", model="bard", ids=IDS, top=3)
    found = logit_lens(models.get("bard").model, [IDS], 3)
    assert [[[cell["id"] for cell in place] for place in row] for row in response["cells"]] == found.top[:, 0].tolist()
    assert response["cells"][6][5][0]["p"] == float(found.probabilities[6, 0, 5, 0])
    assert response["entropy"] == found.entropy[:, 0].tolist()
    assert response["kl"] == found.divergence[:, 0].tolist()
    assert len(response["layers"]) == 7


def test_attribution_is_the_librarys_and_adds_up(ask, models):
    response = ask("attribution", model="bard", ids=IDS, answer=5, wrong=7, position=3)
    found = attribute_logits(models.get("bard").model, [IDS], 5, 7, position=3)
    assert response["names"] == list(found.names)
    assert response["values"] == found.values[:, 0].tolist()
    assert sum(response["values"]) == pytest.approx(response["logit"], abs=1e-3)
    assert response["finding"]["verdict"] == "pass"


def test_attribution_explains_the_most_likely_token_by_default(ask, models):
    response = ask("attribution", model="bard", ids=IDS)
    with torch.no_grad():
        assert response["answer"]["id"] == int(models.get("bard").model(torch.tensor([IDS]))[0, -1].argmax())
    assert response["position"] == 5
    assert "outside a text of 6" in ask.refused("attribution", model="bard", ids=IDS, position=6)[1]


def test_depth_is_the_librarys(ask, models):
    response = ask("depth", model="bard", ids=IDS)
    model = models.get("bard").model
    assert response["norms"]["stream"] == stream_norms(model, [IDS]).stream[:, 0].tolist()
    found = rank.rank_by_depth(model, torch.tensor([IDS]))
    assert response["rank"]["deviation"] == found.deviation[:, 0].tolist()
    assert response["theory"]["attention"] == rank.collapse("attention", 6).deviation.tolist()


@pytest.mark.parametrize("site", ["resid_pre", "attention.heads"])
def test_patching_is_the_librarys_layer_by_layer(ask, models, site):
    clean, corrupt = [18, 47, 56, 57, 58], [35, 47, 56, 57, 42]
    events = ask.events("patch", model="bard", clean=clean, corrupt=corrupt, answer=1, wrong=2, site=site)
    found = patch_effects(
        models.get("bard").model, [clean], [corrupt], 1, 2, site, each_position=site != "attention.heads"
    )
    assert [name for name, _ in events] == ["layer"] * 6 + ["done"]
    done = events[-1][1]
    assert torch.allclose(torch.tensor(done["effects"]), found.effects, atol=1e-4)
    assert done["clean_difference"] == pytest.approx(found.clean)


def test_patching_refuses_what_it_cannot_do(ask):
    def error(**body):
        name, data = ask.events("patch", model="bard", **body)[-1]
        assert name == "error"
        return data["error"]

    assert "same number of tokens" in error(clean="ab", corrupt="abc")
    assert "for both texts" in error(clean="First", corrupt="First")
    assert "outside the vocabulary" in error(clean=[1, 2], corrupt=[1, 99])


def test_an_encoder_decoder_is_read_through_its_decoder(ask):
    assert len(ask("lens", model="pair", ids=[1, 2, 3], target=[0, 4])["cells"][0]) == 2
    assert len(ask("depth", model="pair", ids=[1, 2, 3], target=[0, 4])["norms"]["stream"]) == 3
