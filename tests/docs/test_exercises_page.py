"""The page about exercises names every exercise, and its commands work."""

import re
from pathlib import Path

from glassformer.theory import exercises
from tests.cli.asking import run
from tests.docs.blocks import ROOT, commands

PAGE = (ROOT / "docs" / "exercises.md").read_text(encoding="utf-8")


def test_every_exercise_is_in_the_table():
    table = PAGE[PAGE.index("## The exercises") : PAGE.index("Together they cover")]
    assert sorted(re.findall(r"`([a-z0-9-]+)`", table)) == sorted(exercises.ALL)


def test_the_commands_work_in_their_order(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    codes = {}
    for command in commands(PAGE):
        if command.words[0] == "exercise":
            codes[" ".join(map(str, command.words))], _, _ = run(capsys, *command.words)
    assert codes["exercise rope --stub my_rope.py"] == 0
    assert Path("my_rope.py").read_text() == exercises.find("rope").stub
    assert codes["exercise rope --grade my_rope.py --seed 5"] == 1  # the stub solves nothing
    assert codes["exercise rope --solution"] == 0
