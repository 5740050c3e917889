"""Requests are read and refused at the boundary, and so are texts that the tokenizer of a model cannot encode."""

import enum
import re

import numpy as np
import pytest
import torch

import glassformer as gf
from glassformer import config as c
from glassformer.generation import stream
from glassformer.generation.request import (
    GenerationRequest,
    encode_text,
    read_request,
    read_seeds,
    read_stop,
    tokenizer_of,
)
from glassformer.generation.sampling import GREEDY
from glassformer.model import build
from tests.variants import decoder, seq2seq

MODEL = build(decoder(max_len=16))


class Letter(enum.IntEnum):
    D = 4


def test_arguments_become_plain_values():
    found = read_request(MODEL, torch.tensor([[1, 2], [3, 4]]), 5, seed=7, stop=[9, [1, 2]], cache=False)
    assert found == GenerationRequest(
        prompts=[[1, 2], [3, 4]], max_new_tokens=5, sampling=GREEDY, stops=([9], [1, 2]), seeds=(7, 7), cache=None
    )
    assert found.capacity == 7


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompts": [[1, 31]]}, "token id 31: ids go from 0 to 30"),
        ({"max_new_tokens": 16}, "exceed the context of 16"),
        ({"seed": [1, 2]}, "2 seeds for 1 prompt: give one"),
        ({"seed": "x"}, "seed='x' must be a whole number, or one for each prompt"),
        ({"seed": [1.5]}, r"seed=\[1.5\] must be a whole number"),
        ({"stop": "end"}, "stop='end' must be token ids, or lists of them: encode a text"),
        ({"stop": ["end"]}, "must be token ids, or lists"),
        ({"stop": [[1, 2.5]]}, "must be token ids, or lists"),
        ({"sampling": 0.8}, "sampling=0.8 must be a gf.Sampling"),
        ({"model": "bard"}, "the model is of type str: pass a model, such as gf.load\\('bard'\\) returns"),
        ({"prompts": "hello"}, "the prompt 'hello' is text, and the model carries no tokenizer"),
        ({"prompts": [[1.5]]}, "contains 1.5, of type float: token ids are whole numbers"),
        ({"prompts": [["a"]]}, "contains 'a', of type str"),
        ({"prompts": torch.rand(1, 2)}, "prompts are of dtype float32: token ids are whole numbers"),
        ({"stop": [[]]}, "a stop sequence is empty"),
        ({"prefill_chunk": 0}, "prefill_chunk=0"),
        ({"beams": 0}, "beams=0"),
        ({"draft": "lookup", "beams": 2}, "cannot use a draft"),
        ({"draft": "lookup", "model": build(seq2seq())}, "only a decoder-only model"),
    ],
)
def test_bad_arguments_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        read_request(**{"model": MODEL, "prompts": [[1]], "max_new_tokens": 4, **arguments})


@pytest.mark.parametrize("bad", [-1, 31, 2**31, 2**32 + 1, 2**63, 2**64 + 1, -(2**64), True, False, 1.0, None])
def test_a_bad_id_is_found_anywhere_in_a_prompt(bad):
    model = build(decoder(max_len=64))
    for at in (0, 20, 39):
        prompt = [1] * 40
        prompt[at] = bad
        with pytest.raises(ValueError, match=re.escape(repr(bad))):
            read_request(model, [prompt], 4)


def test_ids_of_other_types_become_ints():
    """Also if only one of them is not an int: the result is made of these lists."""
    [found] = read_request(MODEL, [[1, np.int64(2), torch.tensor(3), Letter.D]], 4).prompts
    assert found == [1, 2, 3, 4]
    assert {type(token) for token in found} == {int}


def test_stream_refuses_before_the_first_step():
    with pytest.raises(ValueError, match="exceed the context"):
        stream(MODEL, [[1]], 16)


def test_stops_default_to_the_end_of_text():
    assert read_stop(build(decoder(special=c.Special(eos=(3, 4)))), None) == [[3], [4]]
    assert read_stop(MODEL, 5) == [[5]]
    assert read_seeds([4, 5], 2) == [4, 5]


def test_a_loaded_model_has_the_tokenizer_of_its_folder():
    found = tokenizer_of(gf.load("bard"))
    assert encode_text(found, "ROMEO:") == gf.load_tokenizer("bard").encode("ROMEO:").ids


def test_a_model_that_was_built_or_whose_folder_has_none_has_no_tokenizer(tmp_path):
    model = build(gf.presets.nano(max_len=16))
    assert tokenizer_of(model) is None
    gf.save(model, tmp_path / "m")
    assert tokenizer_of(gf.load(tmp_path / "m")) is None
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer.*pass token ids"):
        tokenizer_of(gf.load(tmp_path / "m"))


def test_a_character_that_is_no_token_is_named():
    with pytest.raises(ValueError, match=r"'½' \(U\+00BD\), which is not one of the 65 tokens"):
        encode_text(gf.load_tokenizer("bard"), "to ½ be")
