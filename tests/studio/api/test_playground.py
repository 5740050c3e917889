import numpy as np
import pytest
import torch

import glassformer as gf
from glassformer.generation import distribution

TEXT = "ROMEO:\nBut soft"


@pytest.fixture
def bard(models):
    return models.get("bard")


def test_tokens_are_the_tokenizers(ask, bard):
    response = ask("tokens", model="bard", text=TEXT)
    assert response["ids"] == bard.tokenizer.encode(TEXT).ids
    assert "".join(response["pieces"]) == TEXT
    assert [TEXT[a:b] for a, b in response["offsets"]] == response["pieces"]
    assert ask("tokens", model="bard", ids=response["ids"])["text"] == TEXT
    assert ask("tokens", model="bard", text="")["ids"] == []


def test_a_character_outside_the_alphabet_is_named(ask):
    status, sentence = ask.refused("tokens", model="bard", text="héllo")
    assert status == 400
    assert "'é'" in sentence


def test_vocabulary_is_every_word(ask, bard):
    assert ask("vocabulary", model="bard")["pieces"] == [bard.token_text(i) for i in range(65)]


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.7, "top_k": 5}, {"top_p": 0.6, "min_p": 0.1}, {"temperature": 0.0}]
)
def test_the_next_tokens_distribution_is_that_of_the_library(ask, bard, sampling):
    ids = bard.encode(TEXT)
    response = ask("next", model="bard", ids=ids, count=65, **sampling)
    with torch.no_grad():
        logits = bard.model(torch.tensor([ids]))[:, -1]
    wanted = distribution(logits, gf.Sampling(**sampling))[0]
    got = torch.zeros(65, dtype=torch.float64)
    for row in response["top"]:
        got[row["id"]] = row["p"]
        assert row["kept"] == (row["p"] > 0)
        assert row["raw"] == pytest.approx(float(logits[0].double().softmax(-1)[row["id"]]), abs=1e-6)
    assert torch.allclose(got, wanted, atol=1e-6)
    assert response["kept"] == int((wanted > 0).sum())
    assert response["entropy"] == pytest.approx(float(torch.special.entr(wanted).sum()), abs=1e-5)
    assert [row["logit"] for row in response["top"]] == sorted((row["logit"] for row in response["top"]), reverse=True)


def test_all_logits_come_as_tensors(ask, bard):
    ids = bard.encode(TEXT)
    arrays, _ = ask.tensors("next", model="bard", ids=ids)
    with torch.no_grad():
        wanted = bard.model(torch.tensor([ids]))[0, -1].numpy()
    assert arrays["logits"].dtype == np.float32
    assert np.allclose(arrays["logits"], wanted, atol=1e-5)


@pytest.mark.sample(5)
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.9, "top_k": 20}])
@pytest.mark.parametrize("model", ["bard", "tiny", "pair"])
def test_generated_tokens_are_those_of_generate(ask, models, model, sampling, cache):
    loaded = models.get(model)
    events = ask.events("generate", model=model, ids=[3, 1, 4], max_new_tokens=12, seed=5, cache=cache, **sampling)
    wanted = gf.generate(loaded.model, [[3, 1, 4]], 12, gf.Sampling(**sampling), cache=cache, seed=5).new[0]
    tokens = [data for name, data in events if name == "token"]
    assert [token["id"] for token in tokens] == wanted
    name, done = events[-1]
    assert (name, done["ids"]) == ("done", wanted)
    assert done["text"] == loaded.decode(wanted)
    assert all((token["kv_bytes"] > 0) == cache and token["ms"] > 0 and 0 < token["p"] <= 1 for token in tokens)


def test_the_text_of_the_tokens_joined_is_the_whole_text(ask, models):
    events = ask.events("generate", model="bard", text=TEXT, max_new_tokens=30, seed=1)
    assert "".join(data["text"] for name, data in events if name == "token") == events[-1][1]["text"]


def test_probabilities_of_generated_tokens_are_the_librarys(ask, bard):
    events = ask.events("generate", model="bard", text=TEXT, max_new_tokens=5, temperature=0.8, top_p=0.9, seed=2)
    ids = bard.encode(TEXT)
    for name, token in events:
        if name == "token":
            with torch.no_grad():
                logits = bard.model(torch.tensor([ids]))[:, -1]
            p = distribution(logits, gf.Sampling(0.8, top_p=0.9))[0, token["id"]]
            assert token["p"] == pytest.approx(float(p), abs=1e-5)
            ids = [*ids, token["id"]]


@pytest.mark.parametrize("beams", [2, 4])
def test_the_best_of_a_beam_search_is_that_of_generate_and_lies_in_the_tree(ask, bard, beams):
    ids = bard.encode(TEXT)
    response = ask("beam", model="bard", ids=ids, beams=beams, steps=6)
    wanted = gf.generate(bard.model, [ids], 6, beams=beams)
    (best,) = response["best"]
    assert best["ids"] == wanted.new[0]
    assert best["score"] == pytest.approx(wanted.scores[0])
    nodes = {node["id"]: node for node in response["nodes"]}
    here, total = 0, 0.0
    for token in best["ids"]:
        (here,) = [n["id"] for n in response["nodes"] if n["parent"] == here and n["token"] == token]
        total += nodes[here]["logp"]
        assert nodes[here]["score"] == pytest.approx(total, abs=1e-4)
    assert total / 6 == pytest.approx(best["score"], abs=1e-4)


def test_every_level_of_the_tree_keeps_as_many_as_there_are_beams(ask, bard):
    response = ask("beam", model="bard", text=TEXT, beams=3, steps=5)
    for level in range(1, 6):
        here = [node for node in response["nodes"] if node["level"] == level]
        assert sum(node["kept"] for node in here) == 3
        parents = {node["parent"] for node in here}
        assert all(response["nodes"][parent]["kept"] for parent in parents)


def test_an_encoder_decoder_returns_its_target_and_continues_it(ask, models):
    """Its own greedy answer when nothing is given; the next token and a longer answer follow the text so far."""
    model, source = models.get("pair").model, [3, 1, 4, 1, 5]
    own = list(gf.generate(model, [source], 24, gf.Sampling(0.0))[0])
    response = ask("tokens", model="pair", ids=source)
    assert response["target"]["ids"] == own
    assert ask("tokens", model="pair", ids=source, target=[0, 7])["target"]["ids"] == [0, 7]
    assert "target" not in ask("tokens", model="bard", text="To be")
    logits, _ = ask.tensors("next", model="pair", ids=source, target=own[:4])
    with torch.no_grad():
        wanted = model(torch.tensor([source]), torch.tensor([own[:4]]))[0, -1]
    torch.testing.assert_close(torch.tensor(logits["logits"]), wanted, rtol=1e-5, atol=1e-5)
    about = {"model": "pair", "ids": source, "temperature": 0.0, "max_new_tokens": 6}
    for cache in (True, False):
        done = ask.events("generate", **about, target=own[:4], cache=cache)[-1][1]
        assert done["ids"] == own[4:10]
    status, response = ask.refused("tokens", model="pair", ids=source, target_text="hello")
    assert (status, "token ids" in response) == (400, True)


def test_an_encoder_cannot_continue(ask):
    for path, more in (("next", {}), ("beam", {})):
        status, sentence = ask.refused(path, model="both", ids=[1, 2], **more)
        assert status == 400
        assert "cannot generate" in sentence
    assert ask.events("generate", model="both", ids=[1])[0][0] == "error"


def test_a_full_context_is_refused_in_words(ask):
    status, sentence = ask.refused("next", model="table", ids=[1] * 48)
    assert status == 400
    assert "context of 48" in sentence
