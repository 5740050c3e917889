"""Write docs/commands.md, the help of every command (`python -m glassformer.cli.page`; part of `make docs`)."""

import contextlib
import io
import os
import sys
from pathlib import Path

from glassformer.cli.parse import VERBS, load, parse
from glassformer.files import write_atomically

COLUMNS = 88
INTRODUCTION = """# Commands

<!-- Written by `make docs` from the parsers: edit the docstrings of the commands, not this page. -->

`glass help` lists the commands, and `glass help train` prints what stands here for one of them. An option that takes a
list takes one value and may be repeated. Wrong input gets one sentence on standard error and exit code 2. `--json`
prints one JSON object (`glass train` prints one per line, and `glass bench decode --json FILE` writes a file).
"""


def commands_page() -> str:
    """Return the page: one section for each command, with its help as the terminal shows it."""
    sections = [f"## glass {verb}\n\n{_first_sentence(verb)}\n\n```text\n{_help(verb)}\n```" for verb in VERBS]
    return "\n\n".join([INTRODUCTION.rstrip(), *sections]) + "\n"


def _first_sentence(verb: str) -> str:
    lines = (load(verb).__doc__ or "").strip().split("\n\n")[0].split()
    return " ".join(lines)


def _help(verb: str) -> str:
    before = {name: os.environ.get(name) for name in ("COLUMNS", "NO_COLOR")}
    os.environ.update(COLUMNS=str(COLUMNS), NO_COLOR="1")
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
            parse(["help", verb])()
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    return "\n".join(line.rstrip() for line in out.getvalue().strip().splitlines())


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs")
    write_atomically(folder / "commands.md", commands_page().encode())
