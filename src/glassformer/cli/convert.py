"""`glass convert`: write a model in another format."""

from pathlib import Path
from typing import Annotated, Literal

import tyro

from glassformer.cli.common import Json, check_parent, option, report


def convert(
    source: Annotated[
        tyro.conf.Positional[str], tyro.conf.arg(metavar="SRC", help="A model folder or a Hugging Face hub name.")
    ],
    target: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DST", help="The folder to write.")],
    to: Annotated[
        Literal["hf", "glass"], tyro.conf.arg(help="Format: a Hugging Face folder, or this package's own.")
    ] = "hf",
    dtype: Annotated[
        str | None,
        option("Dtype of the weights: float32, bfloat16 or float16. Default: the dtype of the file.", "DTYPE"),
    ] = None,
    force: Annotated[bool, tyro.conf.arg(help="Replace DST if it holds a model or a checkpoint.")] = False,
    json: Json = False,
) -> int:
    """Write a model in another format, read it back, compare it with the source, and only then rename it to DST."""
    from glassformer.weights import load
    from glassformer.weights.export import write_folder
    from glassformer.weights.folder import Origin
    from glassformer.weights.target import check_apart, check_target
    from glassformer.weights.verify import same_logits

    if Path(source).expanduser().is_dir():
        check_apart(Path(source), target)
    target = check_target(target, force)  # before a large model is read for nothing
    check_parent(f"DST {target}", target, makes_folders=True)
    model = load(source, dtype=dtype, require_finite=True)
    origin = model.origin
    assert isinstance(origin, Origin)
    check_apart(origin.path, target)  # a hub name means a folder too
    notes = list(origin.notes)
    findings = []

    def compare(folder: Path) -> None:
        findings.append(same_logits(model, load(folder)))
        if not findings[0].passed:
            raise _DifferentError

    try:
        write_folder(model, target, to, overwrite=force, check=compare)
    except _DifferentError:
        report(findings, json, written=None, format=to, notes=notes)
        return 1
    report(findings, json, written=str(target), format=to, notes=notes)
    return 0


class _DifferentError(Exception):
    """The written folder computes other logits than its source, so it is discarded."""
