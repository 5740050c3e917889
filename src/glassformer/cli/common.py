"""What the verbs share: common options, checks of input and output paths, and printing findings."""

import contextlib
import json
import os
import tempfile
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from glassformer.cli import fitted as fitted
from glassformer.cli import terminal_width as terminal_width
from glassformer.config import choices
from glassformer.errors import GlassformerError

if TYPE_CHECKING:
    from glassformer.finding import Finding

Json = Annotated[bool, tyro.conf.arg(help="Print one JSON object on standard output and nothing else.")]
Force = Annotated[bool, tyro.conf.arg(help="Replace an output file that already exists.")]


def option(help: str, metavar: str | None = None, aliases: list[str] | None = None, name: str | None = None) -> Any:
    """Return the help of an option. The words "default:" or "require" in it replace the default of the parser.

    `name` is for an option whose name Python does not allow for a parameter.
    """
    hint = "" if "default:" in help.lower() or "require" in help.lower() else None
    return tyro.conf.arg(help=help, metavar=metavar, aliases=aliases, help_behavior_hint=hint, name=name)


Adapter = Annotated[
    str | None,
    option(
        "Folder of a LoRA or DoRA adapter, from peft or from a training run; it is merged into the model. Default: "
        "none.",
        "DIR",
    ),
]
# Options of the commands that generate text
BUNDLED = "bard"
ModelSource = Annotated[
    str | None,
    option("Model folder, or a hub name such as gpt2. Default: bard, a small model that is bundled.", "DIR|NAME"),
]
Temperature = Annotated[
    float, option("Divides the logits: below 1 sharpens, above 1 flattens, 0 takes the most likely token.")
]
TopK = Annotated[int, option("Sample from the k most likely tokens only. 0 turns this off and keeps all tokens.")]
TopP = Annotated[
    float, option("Sample from the smallest set of tokens whose probabilities sum to p. 1 keeps all tokens.")
]
MinP = Annotated[float, option("Drop tokens below this fraction of the largest probability. 0 keeps all tokens.")]
RepetitionPenalty = Annotated[
    float, option("Make tokens that already occurred less likely by this factor. 1 turns this off.")
]
Seed = Annotated[int, option("Seed of the random numbers. The same seed gives the same text.")]
Device = Annotated[choices.Device, option("Where to compute. `auto` is the GPU if there is one.")]
Precision = Annotated[
    choices.Precision,
    option(
        "Number format of the weights while decoding. `auto` is float32 on a CPU and the stored dtype on a GPU. int8 "
        "and int4 need the compiled kernels."
    ),
]
Threads = Annotated[int | None, option("Number of CPU threads. Default: one for each core that torch finds.", "INT")]


class InputError(GlassformerError):
    """Invalid input on the command line."""


def check_writable(
    option: str, path: Path, *, suffixes: Sequence[str] = (), makes_folders: bool = False, force: bool = False
) -> None:
    """Refuse, before any work, an output file that could not or must not be written after it.

    One rule for every command: an existing file is replaced only with --force, and only a regular file ever is.
    """
    named = f"{option} {path}"
    if suffixes and path.suffix.lower() not in suffixes:
        raise InputError(f"{named} must be an {suffixes[0]} file.")
    if path.is_dir():
        raise InputError(f"{named} is a folder: give the name of a file.")
    if path.exists() and not path.is_file():
        raise InputError(f"{named} is not a regular file: give another path.")
    check_parent(named, path, makes_folders=makes_folders)
    if path.exists() and not force:
        raise InputError(f"{named} already exists: pass --force to replace it, or give another path.")


def check_parent(named: str, path: Path, *, makes_folders: bool = False) -> None:
    """Refuse a path if nothing can be written next to it. `named` is what messages call the path.

    A temporary file without a name is made there: permissions alone do not reveal a read-only disk, and the superuser
    has all of them.
    """
    folder = path.parent
    while makes_folders and not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir():
        if os.path.lexists(folder):
            raise InputError(f"{named} cannot be written ({folder} is not a folder): give another path.")
        raise InputError(f"{named}: there is no folder {folder}; make it first.")
    try:
        with tempfile.TemporaryFile(dir=folder), contextlib.suppress(FileNotFoundError):
            os.lstat(folder / f".{path.name}.12345678")  # refuses a name too long for its temporary file
    except OSError as error:
        raise InputError(f"{named} cannot be written ({error.strerror}): give another path.") from None


def free_name(path: Path, force: bool) -> Path:
    """Return the path of an output that the user did not name: `path`, or `path-2`, `path-3`, … if that exists."""
    found, number = path, 1
    while os.path.lexists(found) and not force:
        number += 1
        found = path.with_stem(f"{path.stem}-{number}")
    return found


def wrapped(text: str, width: int | None) -> str:
    """Break lines longer than `width` at blanks and indent what continues them; None: a line may have any length.

    Blanks at the end of a line are removed in either case.
    """
    lines: list[str] = []
    for line in text.split("\n"):
        line = line.rstrip()
        if width is None or len(line) <= width:
            lines.append(line)
            continue
        indent = " " * min(len(line) - len(line.lstrip()) + 2, width // 2)
        lines += textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False)
    return "\n".join(lines)


def check_seed(seed: int) -> None:
    """Refuse seeds that numpy (negative ones) or torch (more than 63 bits) does not accept."""
    if not 0 <= seed < 2**63:
        raise InputError(f"--seed {seed} must be between 0 and 2^63 - 1.")


def token_ids(option: str, texts: Sequence[str]) -> list[int]:
    """Return token ids that are separated by spaces or commas. A repeated option appends ids."""
    try:
        return [int(part) for text in texts for part in text.replace(",", " ").split()]
    except ValueError:
        raise InputError(f"{option} {' '.join(texts)} must be token ids such as '5 17 3'.") from None


def refuse_unused(
    command: str, given: Mapping[str, object], used: Collection[str], defaults: Mapping[str, object]
) -> None:
    """Refuse an option that would silently be ignored. `defaults` holds the defaults that are not None."""
    for name, value in given.items():
        if name not in used and value != defaults.get(name):
            raise InputError(f"{command} has no use for --{name.replace('_', '-')}: leave it out.")


def report(findings: Sequence["Finding"], as_json: bool, **facts: Any) -> None:
    """Print findings and facts, as one JSON object or as text."""
    if as_json:
        print(json.dumps({"findings": [f.to_dict() for f in findings], **facts}))
        return
    for name, value in facts.items():
        if value:
            print(f"{name}: {value if not isinstance(value, list) else '; '.join(map(str, value))}")
    for finding in findings:
        print(finding.text())


def set_threads(threads: int) -> None:
    """Let torch compute in this number of threads."""
    if threads < 1:
        raise InputError(f"--threads {threads} must be a whole number of at least 1.")
    import torch

    torch.set_num_threads(threads)
