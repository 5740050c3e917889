"""Command lines as words: lists and positionals in either order, help, misspelt verbs and options, lazy imports."""

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from glassformer.cli.parse import VERBS, load, options, parse
from tests.cli.asking import run

POSITIONALS = {
    "tour": {},
    "train": {"run": Path("run.toml")},
    "sample": {"prompt": "ROMEO:"},
    "look": {"kind": "heads"},
    "check": {"names": ("rope-relative",)},
    "exercise": {"id": "rope"},
    "doctor": {"subject": "file.py:build"},
    "compare": {"a": "A", "b": "B"},
    "bench": {"task": "decode"},
    "size": {"subject": "gpt2"},
    "convert": {"source": "SRC", "target": Path("DST")},
    "serve": {},
    "env": {},
}
LISTS = [(verb, option) for verb in VERBS for option, several in options(load(verb)).items() if several]
EXAMPLES = {"--set": "loop.steps=5", "--expect": "prefix=16", "--tokens": "5 17", "--stop": "."}


def words_of(verb):
    return [str(word) for value in POSITIONALS[verb].values() for word in (value if type(value) is tuple else [value])]


def test_there_are_list_options_to_try():
    assert {("train", "--set"), ("sample", "--stop"), ("doctor", "--expect"), ("bench", "--against")} <= set(LISTS)


@pytest.mark.parametrize(("verb", "option"), LISTS)
def test_a_list_option_takes_one_value_before_and_after_the_positionals(verb, option):
    first, second = EXAMPLES.get(option, "x"), "k=2"
    for words in (
        [option, first, option, second, *words_of(verb)],
        [*words_of(verb), option, first, f"{option}={second}"],
        [option, first, *words_of(verb), option, second],
    ):
        given = parse([verb, *words]).keywords
        value = given[option.removeprefix("--").replace("-", "_")]
        assert [str(each) for each in value] == [first, second]
        assert {name: given[name] for name in POSITIONALS[verb]} == POSITIONALS[verb]


@pytest.mark.parametrize(("verb", "option"), LISTS)
def test_an_option_that_is_not_given_is_an_empty_list(verb, option):
    """A default that is not empty would stay in front of what a user gives."""
    given = parse([verb, *words_of(verb)]).keywords[option.removeprefix("--").replace("-", "_")]
    assert list(given) == []


@pytest.mark.parametrize(
    ("words", "written"),
    [
        ("train --set a=1 b=2", "train --set a=1 --set b=2"),
        ("train --set a=1 b=2 c=3", "train --set a=1 --set b=2 --set c=3"),
        ("train --set a=1 b=2 run.toml", "train --set a=1 --set b=2 run.toml"),
        ("train run.toml --set a=1 b=2 c=3 --json", "train run.toml --set a=1 --set b=2 --set c=3 --json"),
        ("sample hi --stop . ! --seed 3", "sample hi --stop . --stop '!' --seed 3"),
        ("sample --stop a b hi", "sample --stop a --stop b hi"),
        ("doctor m.py --expect prefix=1 scale=1", "doctor m.py --expect prefix=1 --expect scale=1"),
        ("compare A B --tokens 5 17 3", "compare A B --tokens 5 --tokens 17 --tokens 3"),
        ("bench --against x y decode", "bench --against x --against y decode"),
        ("bench decode --against x y --precision int8 int4",
         "bench decode --against x --against y --precision int8 --precision int4"),
        ("serve --model a b", "serve --model a --model b"),
    ],
)  # fmt: skip
def test_several_values_after_one_option_are_one_sentence_with_the_command_to_write(capsys, words, written):
    code, out, err = run(capsys, *words.split())
    assert (code, out) == (2, "")
    assert re.fullmatch(rf"glass: --[\w-]+ takes one value at a time: write `glass {re.escape(written)}`\.\n", err)


def test_an_assignment_that_is_a_file_is_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("lr=3.toml").write_text("")
    given = parse(["train", "--set", "loop.steps=5", "lr=3.toml"]).keywords
    assert (given["set"], given["run"]) == (("loop.steps=5",), Path("lr=3.toml"))


@pytest.mark.parametrize("verb", VERBS)
def test_the_options_are_those_that_tyro_shows(capsys, verb):
    with pytest.raises(SystemExit) as end:
        parse(["help", verb])
    assert not end.value.code
    left = [line.split("  ")[0] for line in re.findall(r"^(?:│ |  )(-.*)$", capsys.readouterr().out, re.MULTILINE)]
    shown = {option for words in left for option in re.findall(r"(?<!\S)--[a-z][\w-]*", words)}
    assert shown == {*options(load(verb)), "--help"}


@pytest.mark.parametrize("words", [["help"], ["--help"], ["-h"], ["help", "help"]])
def test_help_lists_every_verb_with_its_description(capsys, words):
    code, out, err = run(capsys, *words)
    assert (code, err) == (0, "")
    for verb in VERBS:
        start = " ".join((load(verb).__doc__ or "").split()[:4])
        assert re.search(rf"• {verb} +{re.escape(start)}", out)


@pytest.mark.parametrize("columns", [80, 60])
@pytest.mark.parametrize("verb", [None, *VERBS])
def test_help_fits_the_terminal_and_never_says_none(capsys, monkeypatch, verb, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, err = run(capsys, "help", *([verb] if verb else []))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [line for line in lines if len(line) > columns] == []
    assert [line for line in lines if line != line.rstrip()] == []
    assert lines[0].startswith(f"usage: glass {verb or '[-h] COMMAND'}")
    if verb:  # the description is whole
        assert " ".join((load(verb).__doc__ or "").partition("\n\n")[0].split()) in " ".join(out.split())
    assert "None" not in out  # a default of None is explained in words
    assert "(default: )" not in out


def test_help_in_a_terminal_keeps_its_colours(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[" in run(capsys, "help", "exercise")[1]


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_says_in_a_sentence_what_it_does_and_its_default(verb):
    hints = get_type_hints(load(verb), include_extras=True)
    for name, parameter in inspect.signature(load(verb)).parameters.items():
        (result,) = (mark for mark in hints[name].__metadata__ if hasattr(mark, "help_behavior_hint"))
        assert result.help[0].isupper(), result.help
        assert result.help.endswith("."), result.help
        if parameter.default in (None, ()):  # others are shown by tyro
            assert re.search("[Dd]efault:|[Rr]equire", f"{result.help} {result.help_behavior_hint}"), name


def test_glass_alone_shows_the_verbs_and_is_exit_2(capsys):
    code, out, err = run(capsys)
    assert (code, out) == (2, "")
    assert "• sample" in err


def test_help_of_a_verb_is_its_own_help(capsys):
    wanted = run(capsys, "train", "--help")
    assert wanted[0] == 0
    assert "--resume" in wanted[1]
    assert run(capsys, "help", "train") == wanted


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["sampel"], "'sampel' is not a command. Did you mean sample?"),
        (["help", "sampel"], "'sampel' is not a command. Did you mean sample?"),
        (["helpp"], "'helpp' is not a command. Did you mean help?"),
        (["paint"], "'paint' is not a command."),
        (["--json", "size"], "the first word must be a command, not --json"),
        (["sample", "--topk", "3", "hi"], "glass sample has no option --topk. Did you mean --top-k"),
        (["sample", "hi", "--temprature=2"], "glass sample has no option --temprature. Did you mean --temperature"),
        (["size", "gpt2", "--qqqq"], "glass size has no option --qqqq. Options: --batch"),
        (["sample", "hi", "-q"], "glass sample has no use for '-q'"),
        (["size", "gpt2", "gpt3"], "glass size has no use for 'gpt3'"),
    ],
)
def test_a_misspelt_word_is_one_sentence_and_exit_2(capsys, words, sentence):
    code, out, err = run(capsys, *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"glass: {sentence}")


def test_words_after_two_dashes_are_no_options():
    assert parse(["sample", "--", "--topk"]).keywords["prompt"] == "--topk"


@pytest.mark.sample(6)
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_imports_its_own_module_and_no_other(verb):
    code = f"""
import sys
from glassformer.cli.parse import parse
try:
    parse([{verb!r}, "--help"])
except SystemExit:
    print(" ".join(sys.modules), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert {name for name in loaded if name.startswith("glassformer.cli.")} == {
        "glassformer.cli.common",
        "glassformer.cli.parse",
        f"glassformer.cli.{VERBS[verb]}",
    }
    assert not loaded & {"torch", "numpy", "matplotlib"}


def test_completion_of_a_shell_knows_the_verbs(capsys):
    with pytest.raises(SystemExit) as end:
        parse(["--tyro-print-completion", "bash"])
    assert not end.value.code
    assert "sample" in capsys.readouterr().out
