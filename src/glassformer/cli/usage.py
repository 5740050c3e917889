"""Explain in one sentence why a command line cannot be parsed: the value, the rule and the remedy."""

import inspect
from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin

from glassformer.cli.parse import Parameter
from glassformer.errors import listing, nearest

NUMBERS: dict[Any, tuple[str, float]] = {int: ("a whole number", 8), float: ("a number", 0.5)}
"""Each kind of number: its name, and an example for an option without a default."""


def explain(verb: str, parameters: Sequence[Parameter], words: Sequence[str]) -> str | None:
    """Return what is wrong with the words after a verb; None if nothing that is known here is wrong with them."""
    named = {option: one for one in parameters if not one.positional for option in one.spellings}
    places = [one for one in parameters if one.positional]
    left, texts = list(words), list[str]()
    while left:
        word = left.pop(0)
        if word == "--":
            texts += left
            break
        option, equals, value = word.partition("=")
        if (found := named.get(_spelled(option))) is None:
            texts.append(word)
        elif found.kind is bool:
            if equals:
                return f"{option} takes no value, and {value!r} was given: write {' or '.join(found.spellings)} alone."
        else:
            if not equals and (not left or _spelled(left[0].partition("=")[0]) in named):
                return f"{option} needs a value: {_rule(found) or f'write {option} {found.metavar}'}."
            value = value if equals else left.pop(0)
            if not _accepts(found.kind, value):
                return _refusal(option, found, value)
    for place, text in zip(places, texts, strict=False):
        if not _accepts(place.kind, text):
            return _refusal(place.spellings[0], place, text)
    missing = [place.spellings[0] for place in places[len(texts) :] if place.default is inspect.Parameter.empty]
    if missing:
        usage = " ".join(("glass", verb, *(place.spellings[0] for place in places)))
        return f"glass {verb} needs {listing(missing, 'and')}: write `{usage}`; `glass help {verb}` explains it."
    return None


def _spelled(option: str) -> str:
    return option.replace("_", "-")


def _accepts(kind: Any, text: str) -> bool:
    if get_origin(kind) is Literal:
        return text in map(str, get_args(kind))
    if kind not in NUMBERS:
        return True
    try:
        kind(text)
    except ValueError:
        return False
    return True


def _rule(parameter: Parameter) -> str:
    """Return which values are accepted; empty if any text is."""
    if get_origin(parameter.kind) is Literal:
        return listing([*get_args(parameter.kind)])
    if parameter.kind not in NUMBERS:
        return ""
    name, example = NUMBERS[parameter.kind]
    return f"{name}, such as {parameter.default if type(parameter.default) is parameter.kind else example}"


def _refusal(name: str, parameter: Parameter, value: str) -> str:
    meant = ""
    if get_origin(parameter.kind) is Literal:
        meant = nearest(value, [str(choice) for choice in get_args(parameter.kind)])
    return f"{name} {value} must be {_rule(parameter)}." + (meant if "Did you mean" in meant else "")
