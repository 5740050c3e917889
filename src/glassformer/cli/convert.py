"""`glass convert`: write a model in another format."""

from pathlib import Path
from typing import Annotated, Literal

import tyro

from glassformer.cli.common import Json, check_writable, refuse_nan, report


def convert(
    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SRC", help="A folder or a hub name.")],
    target: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DST", help="The folder to write.")],
    to: Annotated[Literal["hf", "glass"], tyro.conf.arg(help="Hugging Face folder, or our own.")] = "hf",
    dtype: Annotated[str | None, tyro.conf.arg(help="float32, bfloat16 or float16; the file's own by default.")] = None,
    json: Json = False,
) -> int:
    """Write a model in another format, read it back, and compare it with what was read."""
    if not target.is_dir():
        check_writable("DST", target, makes_folders=True)
    from glassformer.weights import load, save
    from glassformer.weights.export import free_target
    from glassformer.weights.verify import same_logits

    free_target(target)  # before a large model is read for nothing
    model = load(source, dtype=dtype)
    refuse_nan(model, source)
    save(model, target, format=to)
    finding = same_logits(model, load(target))
    notes = getattr(getattr(model, "origin", None), "notes", ())
    report([finding], json, written=str(target), format=to, notes=list(notes))
    return 0 if finding.passed else 1
