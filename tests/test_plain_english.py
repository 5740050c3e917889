"""Words that names, docstrings, comments and messages of the package must not contain, room by room.

Each has a standard term: told -> passed, given; said -> reported, printed; beside -> next to, compared with; mend ->
fix; likeliest -> most likely, argmax; no number -> NaN or infinite; infused -> query/key positions.
"""

import io
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "glassformer"
WORDS = re.compile(
    r"\b(?:told|said|beside|likeliest|mend|mends|mended|mending|whereof|nobody|surroundings|obstacle|obstacles"
    r"|infuse|infuses|infused|infusion|manieth|unlikeliest|heretofore|thereof|(?:is|are|was) no numbers?"
    r"|in good order|gone on with|goes on with|no disease)\b",
    re.IGNORECASE,
)
FORMER_NAMES = ('"infused"', "'\"infused\"'", "'kind = \"infused\"'")
"""Names in files that older versions wrote."""
REMAINING = {"training/distributed": 28, "kernels/cuda": 9}
"""Folders of tests that are not clean yet, and how many forbidden words they have at most. No other folder has any."""
TEXT = (tokenize.COMMENT, tokenize.STRING, tokenize.NAME, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
SOURCES = (".cu", ".cuh", ".cpp", ".h")


def words_in(text: str) -> list[str]:
    """Forbidden words of a comment, a string or a name; names are divided at underscores and capitals."""
    plain = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text.replace("_", " "))
    return [match[0].lower() for match in WORDS.finditer(plain)]


def offenders(path: Path) -> list[tuple[int, str]]:
    """Lines and forbidden words of a file."""
    text = path.read_text(encoding="utf-8")
    if not words_in(text):
        return []  # tokens take a hundred times as long
    if path.suffix != ".py":
        return [(i, word) for i, line in enumerate(text.splitlines(), 1) for word in words_in(line)]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    checked = (token for token in tokens if token.type in TEXT and token.string not in FORMER_NAMES)
    return [(token.start[0], word) for token in checked for word in words_in(token.string)]


ROOMS = sorted(path.name for path in SOURCE.iterdir() if path.suffix == ".py" or path.is_dir())


def offenders_of(room: str) -> list[str]:
    """Places and forbidden words of a room, which is a folder or a module."""
    held = SOURCE / room
    files = sorted(path for path in held.rglob("*") if path.suffix in (".py", *SOURCES)) if held.is_dir() else [held]
    return [f"{path.relative_to(SOURCE)}:{line} {word}" for path in files for line, word in offenders(path)]


def test_the_list_catches_what_it_should():
    text = 'def told(self):\n    """The likeliest token, beside it."""\n    isInfused = 1  # nobody\n'
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found = Counter(word for token in tokens if token.type in TEXT for word in words_in(token.string))
    assert found == {"told": 1, "likeliest": 1, "beside": 1, "infused": 1, "nobody": 1}
    assert words_in("folder besides untold amended saidi a loss that is no number") == ["is no number"]


def test_the_tests_have_no_forbidden_word_but_those_that_remain():
    files = [path for path in sorted(TESTS.rglob("*.py")) if path != Path(__file__)]
    found = [f"{path.relative_to(TESTS)}:{line} {word}" for path in files for line, word in offenders(path)]
    assert [place for place in found if not place.startswith(tuple(REMAINING))] == []
    for folder, most in REMAINING.items():
        assert sum(place.startswith(folder) for place in found) <= most, folder


@pytest.mark.parametrize("room", ROOMS)
def test_no_room_has_a_forbidden_word(room):
    assert offenders_of(room) == []
