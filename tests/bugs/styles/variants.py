"""Every bug in every style, with the diagnosis that must come first."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.bugs.styles import (
    contracted,
    encoder,
    functional,
    hugging,
    inline,
    legacy_cache,
    nano,
    pair,
    time_first,
    torch_parts,
    translator,
)

STYLES = {
    "nano": (nano, "decoder"),
    "hugging": (hugging, "decoder"),
    "functional": (functional, "decoder"),
    "contracted": (contracted, "decoder"),
    "encoder": (encoder, "encoder"),
    "pair": (pair, "seq2seq"),
    "inline": (inline, "decoder"),
    "legacy_cache": (legacy_cache, "decoder"),
    "time_first": (time_first, "decoder"),
    "torch_parts": (torch_parts, "decoder"),
    "translator": (translator, "seq2seq"),
}


@dataclass(frozen=True)
class Variant:
    """A bug in a style."""

    style: str
    bug: str
    diagnosis: str
    kind: str
    build: Callable[[], object]

    @property
    def id(self) -> str:
        return f"{self.style}-{self.bug}"


VARIANTS = tuple(
    Variant(style, bug, diagnosis, kind, lambda module=module, bug=bug: module.build(bug))
    for style, (module, kind) in STYLES.items()
    for bug, diagnosis in module.BUGS.items()
)


def variant(id: str) -> Variant:
    return next(v for v in VARIANTS if v.id == id)
