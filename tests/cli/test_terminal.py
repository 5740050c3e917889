"""What the verbs print fits a terminal of 80 or 120 columns, and is plain text in a pipe or with NO_COLOR."""

import contextlib
import io
import re
import shlex

import pytest

from glassformer.cli import main
from glassformer.cli.parse import VERBS

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;\d+)*m")
QUICK = (
    "version",
    "help",
    *(f"help {verb}" for verb in VERBS),
    "size gpt2",
    "size --list",
    "size plan --model llama2_7b --gpus 64 --gpu h100 --price 2.5",
    "size chinchilla --flops 1.2e24",
    "exercise",
    "exercise attention",
    "exercise attention --solution",
    "course",
    "course list --by source",
    "course status",
    "course show orthogonal-distance",
    "course show shape-test",
    "course show gpt",
    "course hint attention",
    "course answer orthogonal-distance 0",
    "course solution orthogonal-distance",
    "check --list",
    "check softmax-shift-invariance --explain",
    "train --fields",
    "smaple",
    "size gpt9",
    "course show selfweight",
    "exercise atention",
    "train no-such-file-with-a-rather-long-name.toml",
)
"""Commands that take no model."""
SLOW = (
    "sample ROMEO: --max-new-tokens 20",
    "eval bard text.txt",
    "check softmax-shift-invariance",
    "env",
    "compare bard bard",
    "doctor bard --quick",
    "look heads --out heads.svg --force",
    "convert bard out --to hf --force",
)


class Stream(io.StringIO):
    """Standard output or standard error, which may be a terminal."""

    def __init__(self, is_terminal: bool):
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


def printed(command, monkeypatch, *, terminal, columns=80, no_color=False):
    """Return what a command prints on both streams."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    else:
        monkeypatch.delenv("NO_COLOR", raising=False)
    out, err = Stream(terminal), Stream(terminal)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.suppress(SystemExit):
        main(shlex.split(command))
    text = out.getvalue() + err.getvalue()
    assert text.strip(), command
    assert "Traceback" not in text
    return text


def shown(text):
    """Return the lines that a terminal shows: without escape codes, and what a carriage return overwrites."""
    return [line.rsplit("\r", 1)[-1] for line in ANSI.sub("", text).split("\n")]


def check_width(command, monkeypatch, columns):
    lines = shown(printed(command, monkeypatch, terminal=True, columns=columns, no_color=columns == 80))
    assert max(map(len, lines)) <= columns, max(lines, key=len)


def check_plain(command, monkeypatch):
    assert not COLOUR.search(printed(command, monkeypatch, terminal=True, no_color=True))
    piped = printed(command, monkeypatch, terminal=False)
    assert "\x1b" not in piped
    assert [line for line in piped.split("\n") if line != line.rstrip()] == []


@pytest.fixture
def desk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GLASSFORMER_COURSE", "course.json")
    (tmp_path / "text.txt").write_text("the cat sat on the mat. the dog sat on the log.\n" * 9)


@pytest.mark.parametrize("command", QUICK)
def test_quick_commands_fit_80_columns(command, desk, monkeypatch):
    check_width(command, monkeypatch, 80)


@pytest.mark.parametrize(
    "command", ["help", "help sample", "check --list", "course show gpt", "train --fields", "smaple"]
)
def test_quick_commands_are_plain(command, desk, monkeypatch):
    check_plain(command, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("command", [*QUICK, *SLOW])
def test_all_commands_at_both_widths_and_plain(command, desk, monkeypatch):
    for columns in (80, 120):
        check_width(command, monkeypatch, columns)
    check_plain(command, monkeypatch)


def test_every_verb_is_tried():
    tried = {command.split()[0] for command in (*QUICK, *SLOW)} | {command.split()[-1] for command in QUICK}
    assert set(VERBS) <= tried


def test_the_checks_find_what_they_look_for():
    assert COLOUR.search("\x1b[1;31mred\x1b[0m")
    assert COLOUR.search("\x1b[38;5;12mblue")
    assert not COLOUR.search("\x1b[1mbold\x1b[0m\x1b[m")
    assert shown("10 %\r20 %\nend") == ["20 %", "end"]
