"""`glass convert`: write a model in another format."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from glassformer.cli.common import Adapter, InputError, Json, check_parent, option, report

if TYPE_CHECKING:
    from glassformer.finding import Finding
    from glassformer.model import Model


HELP = {
    "source": "A model folder, a GGUF file, a nanoGPT checkpoint (.pt) or a Hugging Face hub name.",
    "target": "The folder to write; for gguf, the file.",
    "to": "Format: a Hugging Face folder, this package's own folder, a GGUF file for llama.cpp, a folder for "
    "onnxruntime, or the adapter alone as a peft folder.",
    "dtype": "Dtype of the weights: float32, bfloat16 or float16. Default: the dtype of the file.",
    "quant": "Quantisation of a GGUF file; auto keeps the dtype of the weights.",
    "force": "Replace DST if it holds a model or a checkpoint.",
}
Format = Literal["hf", "glass", "gguf", "onnx", "peft"]
Quant = Literal["auto", "f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]


def convert(
    source: Annotated[tyro.conf.Positional[str], option(HELP["source"], "SRC")],
    target: Annotated[tyro.conf.Positional[Path], option(HELP["target"], "DST")],
    to: Annotated[Format, option(HELP["to"])] = "hf",
    adapter: Adapter = None,
    dtype: Annotated[str | None, option(HELP["dtype"], "DTYPE")] = None,
    quant: Annotated[Quant, option(HELP["quant"])] = "auto",
    force: Annotated[bool, option(HELP["force"])] = False,
    json: Json = False,
) -> int:
    """Write a model in another format, read it back, compare it with the source, and only then rename it to DST.

    A GGUF file is also run by llama.cpp, and an ONNX model by onnxruntime, if they are installed.
    """
    from glassformer.weights import load
    from glassformer.weights.folder import Origin
    from glassformer.weights.formats.unverified import UnverifiedError
    from glassformer.weights.target import check_apart

    _check_suffix(target, to)
    if quant != "auto" and to != "gguf":
        raise InputError(f"--quant {quant} is for --to gguf: leave it out.")
    if Path(source).expanduser().exists():
        check_apart(Path(source), target)
    target = _check_target(target, to, force)  # before a large model is read for nothing
    check_parent(f"DST {target}", target, makes_folders=True)
    model = load(source, adapter=adapter, dtype=dtype, require_finite=True)
    origin = model.origin
    assert isinstance(origin, Origin)
    for place in (origin.path, origin.adapter, origin.base):
        if place is not None:
            check_apart(place, target)  # a hub name means a folder too
    try:
        findings, notes = _write(model, target, to, None if quant == "auto" else quant, force)
    except UnverifiedError as error:
        report(error.findings, json, written=None, format=to, notes=list(origin.notes))
        return 1
    report(findings, json, written=str(target), format=to, notes=[*origin.notes, *notes])
    return 0


def _check_suffix(target: Path, to: str) -> None:
    if to == "gguf" and target.suffix != ".gguf":
        raise InputError(f"DST {target} must end in .gguf, because a GGUF model is one file.")
    if to != "gguf" and target.suffix == ".gguf":
        raise InputError(f"DST {target} ends in .gguf, but --to {to} writes a folder: pass --to gguf, or another name.")


def _check_target(target: Path, to: str, force: bool) -> Path:
    from glassformer.weights.formats.gguf.file import is_gguf
    from glassformer.weights.target import check_file_target, check_target

    return check_file_target(target, force, is_gguf) if to == "gguf" else check_target(target, force)


def _write(model: "Model", target: Path, to: str, quant: str | None, force: bool) -> tuple[list["Finding"], list[str]]:
    """Write and verify the model; return what was verified, and notes."""
    from glassformer.weights import load
    from glassformer.weights.export import write_folder, write_gguf_file, write_onnx_folder
    from glassformer.weights.formats.unverified import UnverifiedError
    from glassformer.weights.verify import same_logits

    if to == "gguf":
        return write_gguf_file(model, target, quant, overwrite=force)[1:]
    if to == "peft":
        from glassformer.weights.formats.adapter import save_peft

        save_peft(model, target, force)
        return [], []
    if to == "onnx":
        return write_onnx_folder(model, target, overwrite=force)[1:]
    findings: list[Finding] = []

    def compare(folder: Path) -> None:
        findings.append(same_logits(model, load(folder)))
        if not findings[0].passed:
            raise UnverifiedError(target, findings)

    write_folder(model, target, to, overwrite=force, check=compare)
    return findings, []
