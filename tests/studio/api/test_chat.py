import pytest
import torch

from glassformer.chat.render import load_renderer

USER = {"role": "user", "content": "the cat <|im_end|>"}
TALK = {"model": "chatty", "messages": [USER], "max_new_tokens": 10, "temperature": 0}


@pytest.fixture(scope="module")
def renderer(models):
    return load_renderer(models.get("chatty").path)


def test_the_prompt_is_the_rendered_one_and_special_tokens_are_marked(ask, renderer):
    name, prompt = ask.events("chat", **TALK)[0]
    assert name == "prompt"
    assert [token["id"] for token in prompt["tokens"]] == renderer.prompt([USER])
    special = [token["piece"] for token in prompt["tokens"] if token["special"]]
    assert special == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]  # what the message says is none
    assert prompt["dropped"] == 0


def test_every_token_has_the_probability_of_the_model(ask, models, renderer):
    events = ask.events("chat", **TALK)
    shown = [token for _, data in events[1:] for token in data.get("tokens", [])]
    done = events[-1][1]
    assert "".join(data["text"] for name, data in events if name == "tokens") == done["text"]
    ids = [i for i in done["ids"] if i not in renderer.ends]
    assert [token["id"] for token in shown] == ids
    prompt = renderer.prompt([USER])
    with torch.no_grad():
        logits = models.get("chatty").model(torch.tensor([prompt + ids]))[0]
    wanted = logits.double().softmax(-1)
    for position, token in enumerate(shown, len(prompt) - 1):
        assert token["p"] == pytest.approx(float(wanted[position, token["id"]]), abs=1e-5)
        assert len(token["top"]) == 5
        assert token["top"][0]["p"] == pytest.approx(token["p"])  # greedy


def test_what_cannot_be_answered_is_one_sentence(ask):
    name, data = ask.events("chat", **{**TALK, "model": "bard"})[-1]
    assert (name, "has no chat template" in data["error"]) == ("error", True)
    name, data = ask.events("chat", **{**TALK, "messages": [{"role": "bot", "content": "x"}]})[-1]
    assert (name, "has the role 'bot'" in data["error"]) == ("error", True)
    assert ask.refused("chat", **{**TALK, "messages": []})[0] == 422


def test_the_page_knows_which_models_have_a_template(client):
    rows = {row["name"]: row["chat"] for row in client.get("/api/state").json()["models"]}
    assert rows["chatty"]
    assert not rows["bard"]
