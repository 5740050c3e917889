"""What the verbs share: the --json flag, refusing, and printing findings."""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

if TYPE_CHECKING:
    from torch import nn

    from glassformer.finding import Finding

Json = Annotated[bool, tyro.conf.arg(help="One JSON object on standard output, nothing else.")]


def option(help: str, metavar: str | None = None, aliases: list[str] | None = None) -> Any:
    """The help of an option. A computed default stands in its own sentence, which replaces the parser's."""
    hint = "" if "Default:" in help else None
    return tyro.conf.arg(help=help, metavar=metavar, aliases=aliases, help_behavior_hint=hint)


class InputError(ValueError):
    """Input this command line cannot work with."""


def check_writable(option: str, path: Path, *, suffixes: Sequence[str] = (), makes_folders: bool = False) -> None:
    """Refuse, before any work, a path that could not be written after it.

    A file beside it is made and removed, as the writing will: permissions alone do not tell of a read-only disk, and
    the superuser has all of them.
    """
    named = f"{option} {path}"
    if suffixes and path.suffix.lower() not in suffixes:
        raise InputError(f"{named} must be an {suffixes[0]} file.")
    if path.is_dir():
        raise InputError(f"{named} is a folder: give the name of a file.")
    folder = path.parent
    while makes_folders and not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir():
        if os.path.lexists(folder):
            raise InputError(f"{named} cannot be written ({folder} is no folder): give another path.")
        raise InputError(f"{named}: there is no folder {folder}; make it first.")
    try:
        handle, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=folder)
    except OSError as error:
        raise InputError(f"{named} cannot be written ({error.strerror}): give another path.") from None
    os.close(handle)
    os.unlink(beside)


def terminal_width() -> int | None:
    """Columns of the terminal that reads the output; None where none does, and lines may be as long as they are."""
    return max(40, shutil.get_terminal_size().columns) if sys.stdout.isatty() else None


def check_seed(seed: int) -> None:
    """Refuse what a generator cannot take: numpy nothing below 0, torch nothing of more than 64 bits."""
    if not 0 <= seed < 2**63:
        raise InputError(f"--seed {seed} must be between 0 and 2^63 - 1.")


def refuse_unused(
    command: str, given: Mapping[str, object], used: Collection[str], defaults: Mapping[str, object]
) -> None:
    """Refuse an option that would silently be ignored; one that has no default here is None when it is not given."""
    for name, value in given.items():
        if name not in used and value != defaults.get(name):
            raise InputError(f"{command} has no use for --{name.replace('_', '-')}: leave it out.")


def refuse_nan(model: "nn.Module", name: str) -> None:
    """Refuse weights that are no numbers: everything computed with them would be none either."""
    from glassformer.weights.verify import not_numbers

    if (told := not_numbers(model)) is not None:
        raise InputError(f"{name}: {told}: copy the weights again, or take an earlier checkpoint.")


def report(findings: Sequence["Finding"], as_json: bool, **facts: Any) -> None:
    """Findings and facts, for a machine or for a person."""
    if as_json:
        print(json.dumps({"findings": [f.to_dict() for f in findings], **facts}))
        return
    for name, value in facts.items():
        if value:
            print(f"{name}: {value if not isinstance(value, list) else '; '.join(map(str, value))}")
    for finding in findings:
        print(finding.text())
