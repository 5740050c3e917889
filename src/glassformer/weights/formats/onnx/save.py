"""Save a model as ONNX: exported into a folder next to its target, run by onnxruntime, and only then renamed."""

import contextlib
import copy
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from glassformer.errors import install, missing
from glassformer.finding import Finding, Verdict
from glassformer.model import DecoderLM, EncoderLM, Seq2Seq
from glassformer.weights.errors import WeightsError
from glassformer.weights.formats.onnx.check import compare_with_onnxruntime
from glassformer.weights.formats.onnx.graphs import Graph, graphs_of, with_dense_experts, with_expanded_keys
from glassformer.weights.formats.unverified import UnverifiedError
from glassformer.weights.swap import staged
from glassformer.weights.target import check_target

OPSET = 20
"""The version of the operators: the newest that the exporter of torch writes without conversions."""
LIMIT = 1_800_000_000
"""Bytes of weights above which they are stored next to the graph; one file of protobuf may have 2 GiB at most."""


def save_onnx(
    model: nn.Module, path: str | Path, overwrite: bool, write_rest: Callable[[Path], None]
) -> tuple[Path, list[Finding], list[str]]:
    """Save a model as a folder for onnxruntime; return its path, what was verified, and notes.

    `write_rest` writes the config and the tokenizer into the folder.

    Raises:
        UnverifiedError: onnxruntime computes something else than the model.
    """
    if not isinstance(model, DecoderLM | EncoderLM | Seq2Seq):
        raise WeightsError(f"a {type(model).__name__} is not a glassformer model: only those can be saved.")
    if absent := [name for name in missing("export") if name not in ("gguf", "onnxruntime")]:
        raise WeightsError(f"ONNX needs {' and '.join(absent)}: {install('export')}.")
    target = check_target(path, overwrite)
    notes = []
    if model.embed.tokens.weight.dtype != torch.float32:
        notes.append("the weights were written as float32, in which onnxruntime computes on every device.")
    exact = copy.deepcopy(model).float().cpu().eval()
    with (
        staged(target, overwrite) as folder,
        with_dense_experts(exact) as has_experts,
        with_expanded_keys(exact),
        torch.no_grad(),
    ):
        if has_experts:
            notes.append("every expert computes every token, because a graph cannot choose: the output is the same.")
        for graph in graphs_of(exact):
            _export(graph, folder / graph.file)
        write_rest(folder)
        findings = compare_with_onnxruntime(folder, exact)
        if any(finding.verdict is Verdict.FAIL for finding in findings):
            raise UnverifiedError(target, findings)
        check_target(target, overwrite)  # again: files may have appeared there in the meantime
    return target, findings, notes


def _export(graph: Graph, file: Path) -> None:
    """Export one graph. Inputs after the named parameters of the function are collected into its last lists."""
    names = list(graph.inputs)
    arguments, shapes = _nest(graph, {n: dict.fromkeys(graph.dynamic[n], torch.export.Dim.AUTO) for n in names})
    try:
        with _quiet():
            program = torch.onnx.export(
                graph.function,
                arguments,
                dynamo=True,
                dynamic_shapes=shapes,
                input_names=names,
                output_names=graph.outputs,
                opset_version=OPSET,
                verbose=False,
            )
    except Exception as error:  # the exporter has many error types, with messages of many lines
        text = str(error.__cause__ or error)
        reason = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
        raise WeightsError(
            f"torch could not export the model as ONNX ({reason}): use --to hf or --to glass, and report this."
        ) from None
    assert program is not None
    _name_dimensions(program.model, graph)
    size = sum(p.nbytes for p in graph.function.parameters())
    program.save(str(file), external_data=size > LIMIT)


def _nest(graph: Graph, shapes: dict[str, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return arguments and their dynamic dimensions, with the keys and values of a side in one list."""
    arguments: list[Any] = []
    dynamic: list[Any] = []
    lists: dict[str, int] = {}
    for name, tensor in graph.inputs.items():
        if not name.startswith("past_key_values"):
            arguments.append(tensor)
            dynamic.append(shapes[name])
            continue
        side = "encoder" if ".encoder." in name else "decoder"
        if side not in lists:
            lists[side] = len(arguments)
            arguments.append([])
            dynamic.append([])
        arguments[lists[side]].append(tensor)
        dynamic[lists[side]].append(shapes[name])
    return tuple(arguments), tuple(dynamic)


def _name_dimensions(model: Any, graph: Graph) -> None:
    """Give the dynamic dimensions their names: the exporter calls them s0, s1, … ."""
    names: dict[str, str] = {}
    for value in model.graph.inputs:
        for index, name in graph.dynamic[value.name].items():
            names.setdefault(str(value.shape[index]), name)
    values = [*model.graph.inputs, *model.graph.outputs]
    values += [out for node in model.graph.all_nodes() for out in node.outputs]
    pattern = re.compile(r"\b(" + "|".join(map(re.escape, names)) + r")\b")
    for value in values:
        for index, size in enumerate(value.shape or ()):
            if not isinstance(size, int) and (new := pattern.sub(lambda m: names[m[1]], str(size))) != str(size):
                value.shape[index] = new


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide what the exporter prints: its progress, warnings about optional packages, and its own deprecations."""
    logger = logging.getLogger("torch.onnx")
    level, others = logger.level, logging.root.manager.disable
    logger.setLevel(logging.ERROR)
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        logging.disable(others)
