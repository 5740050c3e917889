"""Logits against a recorded reference, as Findings: whether weights compute here what they computed elsewhere.

A reference is a small safetensors file, kept beside the weights: `tokens` (and `target` for an encoder-decoder, `mask`
where some are padding) and the `logits` that some trusted implementation gave for them.
"""

import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from glassformer.config import ModelConfig
from glassformer.finding import Finding
from glassformer.model import Seq2Seq
from glassformer.weights.errors import WeightsError
from glassformer.weights.folder import load
from glassformer.weights.hub import resolve
from glassformer.weights.tensors import Tensors

REFERENCE = "reference.safetensors"
# Measured over random models of every family: float32 stays below 1e-5 and float64 below 1e-12 times the largest logit;
# half precisions keep 8 (bfloat16) or 11 (float16) bits, and a dozen roundings add up.
BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 5e-1}


def compare_logits(
    name: str, ours: Tensor, reference: Tensor, bound: float, why: str, mask: Tensor | None = None
) -> Finding:
    """Largest difference of two sets of logits; `mask` (B,T) leaves out padding, where nothing is promised."""
    if ours.shape != reference.shape:
        raise WeightsError(
            f"logits of shape {tuple(ours.shape)} cannot be compared with a reference of {tuple(reference.shape)}: "
            "they come from other tokens or another vocabulary."
        )
    gap = (ours.detach().double().cpu() - reference.detach().double().cpu()).abs()
    if mask is not None:
        gap = gap[mask.cpu()]
    measured = float(gap.max()) if gap.numel() else float("nan")
    return Finding.judge(
        name,
        measured,
        bound,
        why,
        remedy="config.json may not describe these weights, or the reference is another model's: look layer by layer.",
        places=int(gap.numel()),
        largest_logit=float(reference.abs().max()) if reference.numel() else 0.0,
    )


@torch.no_grad()
def not_numbers(model: nn.Module) -> str | None:
    """Which trained parameter holds a NaN or an infinity, in words; None where all are numbers.

    What is not trained may hold infinities (a mask), and never a NaN.
    """
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or parameter.is_meta or not parameter.numel():
            continue
        ends = torch.stack(torch.aminmax(parameter.float() if parameter.dtype.itemsize == 1 else parameter))
        if bool((ends.isfinite() if parameter.requires_grad else ~ends.isnan()).all()):
            continue
        wrong = int((~parameter.isfinite() if parameter.requires_grad else parameter.isnan()).sum())
        return f"{wrong:,} of the {parameter.numel():,} numbers in {name} are NaN or infinite"
    return None


@torch.no_grad()
def same_logits(model: nn.Module, other: nn.Module, length: int = 16, seed: int = 0) -> Finding:
    """Two models on the same random tokens; a conversion that keeps the dtype must not change a bit."""
    config = model.config
    assert isinstance(config, ModelConfig)
    length = min(length, config.max_len or length)
    tokens = torch.randint(0, config.vocab_size, (2, length), generator=torch.Generator().manual_seed(seed))
    inputs = (tokens, tokens) if isinstance(model, Seq2Seq) else (tokens,)
    if config.head is None:
        a, b = (m.encode(tokens) for m in (model, other))  # type: ignore[operator]
    else:
        a, b = (m(*inputs) for m in (model, other))
    return compare_logits("same-logits", a, b, 0.0, f"the same weights on the same {2 * length} tokens")


def record_reference(
    path: str | Path, tokens: Tensor, logits: Tensor, target: Tensor | None = None, mask: Tensor | None = None
) -> Path:
    """Write a reference beside the weights of the folder `path` (or to the file `path`)."""
    file = Path(path) / REFERENCE if Path(path).is_dir() else Path(path)
    tensors = {"tokens": tokens, "logits": logits, "target": target, "mask": mask}
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    save_file({k: t.detach().cpu().contiguous() for k, t in tensors.items() if t is not None}, beside)
    os.replace(beside, file)  # an older record stays whole until the new one is
    return file


@torch.no_grad()
def verify_folder(
    path: str | Path,
    reference_file: str | Path | None = None,
    bound: float | None = None,
    model: nn.Module | None = None,
) -> Finding:
    """The model of a folder against its recorded logits; a skip when there is no record to compare with."""
    folder = resolve(path)
    file = Path(reference_file) if reference_file is not None else folder / REFERENCE
    name = f"weights-match-reference:{folder.name}"
    if not file.exists():
        return Finding.skip(
            name,
            f"{file} does not exist, so there is nothing to compare with.",
            "record the logits of a trusted implementation with glassformer.weights.record_reference.",
        )
    stored = Tensors.of(file)
    held = {key: stored.read(key) for key in stored}
    lacking = [key for key in ("tokens", "logits") if key not in held]
    if lacking:
        raise WeightsError(f"{file} lacks {' and '.join(lacking)}: write it with record_reference.")
    model = model or load(folder)
    tokens, mask = held["tokens"].long(), held["mask"].bool() if "mask" in held else None
    if isinstance(model, Seq2Seq):
        if "target" not in held:
            raise WeightsError(f"{file} lacks target, which an encoder-decoder needs: write it with record_reference.")
        logits, mask = model(tokens, held["target"].long(), source_mask=mask), None
    else:
        logits = model(tokens, mask=mask)
    dtype = next(model.parameters()).dtype
    why = f"rounding of {str(dtype).removeprefix('torch.')}, measured over random models of every family"
    return compare_logits(name, logits, held["logits"], bound or BOUNDS[dtype], why, mask)
