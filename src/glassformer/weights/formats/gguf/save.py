"""Save a model as a GGUF file: written next to its target, read back, run by llama.cpp, and only then renamed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from glassformer.config import ModelConfig
from glassformer.finding import Finding, Verdict
from glassformer.model import DecoderLM, build
from glassformer.weights import families
from glassformer.weights.errors import WeightsError
from glassformer.weights.folder import read_model
from glassformer.weights.formats.gguf.check import compare_with_llama
from glassformer.weights.formats.gguf.file import is_gguf
from glassformer.weights.formats.gguf.vocabulary import write_vocabulary
from glassformer.weights.formats.gguf.write import (
    DTYPES,
    Quantization,
    check_quantization,
    compare_file,
    describe,
    write_gguf,
)
from glassformer.weights.formats.unverified import UnverifiedError
from glassformer.weights.swap import staged_file
from glassformer.weights.target import check_file_target


def save_gguf(
    path: str | Path,
    config: ModelConfig,
    state: Mapping[str, Tensor],
    tokenizer: Any = None,
    template: str | None = None,
    quantization: str | None = None,
    overwrite: bool = False,
) -> tuple[Path, list[Finding], list[str]]:
    """Save a model as a GGUF file; return its path, what was verified, and notes.

    The default `quantization` is that of the weights: f32, f16 or bf16.

    Raises:
        UnverifiedError: llama.cpp computes something else than the model.
    """
    chosen = quantization or DTYPES.get(next(iter(state.values())).dtype, "f32")
    check_quantization(chosen)
    target = check_file_target(path, overwrite, is_gguf)
    described = describe(config, state)
    vocabulary = write_vocabulary(tokenizer, config.vocab_size, config.special, template)
    with staged_file(target, overwrite) as file:
        types = write_gguf(described, file, cast(Quantization, chosen), vocabulary, target.stem)
        compare_file(file, described, types)
        back, read, _ = read_model(file, torch.float32)
        _check_config(described.config, back, added=read.keys() != state.keys())
        copy = build(back, device="meta")
        copy.load_state_dict(read, strict=True, assign=True)
        findings = compare_with_llama(file, cast(DecoderLM, copy.eval()), chosen, tokenizer)
        if any(finding.verdict is Verdict.FAIL for finding in findings):
            raise UnverifiedError(target, findings)
        check_file_target(target, overwrite, is_gguf)  # again: a file may have appeared there in the meantime
    return target, findings, [*described.notes, *vocabulary.notes]


def _check_config(wanted: ModelConfig, back: ModelConfig, added: bool) -> None:
    """Check that the metadata describes the same arithmetic. Biases of zero that were added change nothing."""
    field = None if added else families.difference(wanted, back, 1e-6)  # numbers are float32
    if field is not None:
        a, b = families.arithmetic(wanted).get(field), families.arithmetic(back).get(field)
        raise WeightsError(f"{field}={a!r} cannot be written as GGUF, which would read it as {b!r}: use --to glass.")
