"""Hints for the coding exercises, in three levels: the idea, the method, almost the code."""

import tomllib
from functools import lru_cache
from importlib.resources import files

LEVELS = 3


@lru_cache(maxsize=1)
def _all() -> dict[str, tuple[str, ...]]:
    text = (files(__package__) / "hints.toml").read_text(encoding="utf-8")
    return {name: tuple(hints) for name, hints in tomllib.loads(text).items()}


def hints(id: str) -> tuple[str, ...]:
    """Return the three hints of the exercise with this id."""
    return _all()[id]
