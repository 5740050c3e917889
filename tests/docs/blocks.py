"""Code blocks and commands of a Markdown file."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)
FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
LANGUAGES = ("python", "sh", "toml", "text", "math", "{toctree}", "{eval-rst}")
"""`text` is for output and listings, which no test runs."""


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int


@dataclass(frozen=True)
class Command:
    """A `glass` command line: in a shell block, on an indented line, or between backticks."""

    words: tuple[str, ...]
    line: int


def blocks(text: str) -> list[Block]:
    """Every fenced block. A fence that is not closed is an error."""
    found, language, start, lines = [], None, 0, list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("```"):
            lines.append(line)
        elif language is None:
            language, start, lines = line[3:].strip(), number, []
        else:
            found.append(Block(language, "\n".join(lines) + "\n", start))
            language = None
    assert language is None, f"the block that begins in line {start} has no end"
    return found


def shell_lines(block: Block) -> list[tuple[str, int]]:
    """The commands of a shell block; a backslash joins lines."""
    found, begun, start = [], "", block.line
    for number, line in enumerate(block.text.splitlines(), block.line + 1):
        start = start if begun else number
        begun += line.removesuffix("\\")
        if not line.endswith("\\"):
            found.append((begun, start))
            begun = ""
    return found


def commands(text: str) -> list[Command]:
    """Every `glass` command of a file that has more words than a verb."""
    fenced = blocks(text)
    found = [pair for block in fenced if block.language == "sh" for pair in shell_lines(block)]
    prose = text
    for block in fenced:
        prose = prose.replace(block.text, re.sub(r"[^\n]", "", block.text), 1)
    for match in re.finditer(r"^    (glass .+)$|`(glass [^`]+)`", prose, re.MULTILINE):
        found.append((match[1] or match[2], prose.count("\n", 0, match.start()) + 1))
    words = [(tuple(shlex.split(line, comments=True)), line_number) for line, line_number in found]
    return [Command(each[1:], line) for each, line in words if each[:1] == ("glass",) and len(each) > 1]
