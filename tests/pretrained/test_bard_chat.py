"""The bundled adapter is small, comes with its recipe and data, and answers as it is written next to it."""

import json
from pathlib import Path

import pytest
import torch

import glassformer as gf
from glassformer import pretrained
from glassformer.chat.render import ChatError, load_renderer
from glassformer.tour.tuning import ask
from glassformer.weights.formats.adapter import base_of

FOLDER = pretrained.FOLDERS["bard-chat"]


def rows(name):
    return [json.loads(line) for line in (FOLDER / name).read_text().splitlines()]


def test_it_is_small_and_knows_its_recipe():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 700_000
    recipe = Path(__file__).parents[2] / "recipes" / "bard_chat.toml"
    assert (FOLDER / "run.toml").read_text() == recipe.read_text()
    assert not {path.suffix for path in FOLDER.iterdir()} & {".bin", ".pt", ".pkl"}


def test_it_is_an_adapter_of_bard_wherever_the_package_is():
    assert base_of(FOLDER) == pretrained.FOLDERS["bard"]
    assert pretrained.portable_name(pretrained.FOLDERS["bard"]) == "bard"
    assert pretrained.portable_name("elsewhere/bard") == "elsewhere/bard"
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert not torch.allclose(gf.load("bard-chat")(tokens), gf.load("bard")(tokens), atol=0.1)


def test_questions_for_validation_are_in_other_words():
    asked = {row["prompt"] for row in rows("questions.jsonl")}
    held_out = rows("held_out.jsonl")
    assert not asked & {row["prompt"] for row in held_out}
    assert {row["completion"] for row in held_out} <= {row["completion"] for row in rows("questions.jsonl")}


def test_a_user_cannot_end_the_answer():
    renderer = load_renderer(FOLDER)
    assert renderer.ends == [gf.load_tokenizer("bard").token_to_id("$")]
    with pytest.raises(ChatError, match=r"a message holds '\$', which is a special token"):
        renderer.prompt([{"role": "user", "content": "How much $ have you?"}])


@pytest.mark.slow
def test_it_answers_as_many_new_questions_as_recorded():
    measured = json.loads((FOLDER / "measured.json").read_text())
    found = ask(10**6)
    assert len(found) == measured["held_out_questions"]
    assert sum(one.answer == one.expected for one in found) == measured["answered_letter_for_letter"]
    assert sum(one.base == one.expected for one in found) == measured["answered_by_bard"]
