"""ConfigError and the checks that raise it: one sentence with the value, the rule and the remedy."""

import typing
from typing import Any

from glassformer.errors import GlassformerError


class ConfigError(GlassformerError):
    """A config that cannot be built. The message gives the value, the rule and the remedy."""


def require(condition: bool, message: str) -> None:
    """Raise ConfigError with the message unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def require_positive(owner: object, *names: str) -> None:
    """Raise ConfigError unless these fields are integers of at least 1."""
    for name in names:
        value = getattr(owner, name)
        require(
            isinstance(value, int) and not isinstance(value, bool) and value >= 1,
            f"{type(owner).__name__}.{name}={value!r} must be a whole number of at least 1.",
        )


def require_choice(owner: object, name: str, choices: Any) -> None:
    """Raise ConfigError unless a field has one of the values of a Literal type."""
    value, allowed = getattr(owner, name), typing.get_args(choices)
    require(
        value in allowed,
        f"{type(owner).__name__}.{name}={value!r} is not known. Use one of {', '.join(map(repr, allowed))}.",
    )


def listing(items: list[Any], word: str = "or") -> str:
    """Return `a, b or c`."""
    texts = [str(item) for item in items]
    return texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + f" {word} " + texts[-1]


def nearest(name: str, known: Any, others: str = "Fields:", listed: Any = None) -> str:
    """Return the end of an error message: the known names most like this one, or else all of them (or `listed`)."""
    import difflib  # not needed unless there is an error

    close = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)
    return f" Did you mean {listing(close)}?" if close else f" {others} {', '.join(sorted(listed or known))}."
