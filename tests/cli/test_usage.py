"""Why a command line cannot be parsed: one sentence with the value, the rule and the remedy, and exit code 2."""

from pathlib import Path

import pytest

from glassformer.cli.parse import VERBS, load, parameters
from glassformer.cli.usage import explain
from tests.cli.asking import run

MISTAKES = {
    "size gpt2 --batch many": "--batch many must be a whole number, such as 8.",
    "size gpt2 --batch=2.5": "--batch 2.5 must be a whole number, such as 8.",
    "size jl --eps small": "--eps small must be a number, such as 0.1.",
    "serve --port x": "--port x must be a whole number, such as 8000.",
    "sample hi --engine nativ": "--engine nativ must be auto, torch or native. Did you mean native?",
    "sample hi --engine zzz": "--engine zzz must be auto, torch or native.",
    "sample hi --top_k ten": "--top_k ten must be a whole number, such as 50.",
    "doctor a --kind decodr": "--kind decodr must be decoder, encoder or seq2seq. Did you mean decoder or encoder?",
    "compare a b --dtype int8": "--dtype int8 must be float64, float32, bfloat16 or float16.",
    "bench decoding": "TASK decoding must be decode, prefill, encode, train, startup or growth. Did you mean decode or "
    "encode?",
    "sample hi --seed": "--seed needs a value: a whole number, such as 0.",
    "sample hi --seed --json": "--seed needs a value: a whole number, such as 0.",
    "sample hi --engine": "--engine needs a value: auto, torch or native.",
    "serve --model": "--model needs a value: write --model DIR|NAME.",
    "train --set": "--set needs a value: write --set FIELD=VALUE.",
    "sample hi --json=yes": "--json takes no value, and 'yes' was given: write --json or --no-json alone.",
    "convert": "glass convert needs SRC and DST: write `glass convert SRC DST`; `glass help convert` explains it.",
    "convert a --force": "glass convert needs DST: write `glass convert SRC DST`; `glass help convert` explains it.",
    "look": "glass look needs KIND: write `glass look KIND`; `glass help look` explains it.",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_each_mistake_is_one_sentence_and_exit_2(capsys, words):
    code, out, err = run(capsys, *words.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"glass: {MISTAKES[words]}")


@pytest.mark.parametrize("verb", VERBS)
def test_every_number_and_choice_is_checked_and_every_missing_value_noticed(capsys, verb):
    """Whatever tyro refuses is explained: its box is never printed."""
    given = [one.spellings[0] for one in parameters(load(verb)) if one.positional and not one.several]
    given = ["decode"] if verb == "bench" else given
    for one in parameters(load(verb)):
        if one.positional or one.kind is bool:
            continue
        option = next(name for name in one.spellings if name.startswith("--"))
        for words in ([*given, option], *([] if one.kind in (str, Path) else [[*given, option, "no-such-value"]])):
            code, out, err = run(capsys, verb, *words)
            assert (code, out, err.count("\n")) == (2, "", 1), words
            assert option in err


def test_words_in_which_nothing_is_wrong_have_no_explanation():
    known = parameters(load("sample"))
    for words in (["hi"], ["--", "--seed"], ["hi", "--temperature", "-1", "--stop=a", "--no-cache"], []):
        assert explain("sample", known, words) is None
