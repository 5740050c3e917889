"""docs/commands.md is the help of every command."""

from pathlib import Path

from glassformer.cli.page import commands_page
from glassformer.cli.parse import VERBS

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"


def test_the_committed_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == commands_page(), "run make docs"


def test_every_command_has_a_section_whose_lines_fit():
    text = PAGE.read_text(encoding="utf-8")
    assert [line[9:] for line in text.splitlines() if line.startswith("## glass ")] == list(VERBS)
    help_lines = [line for block in text.split("```text\n")[1:] for line in block.split("```")[0].splitlines()]
    assert len(help_lines) > 300
    assert max(map(len, help_lines)) <= 88
