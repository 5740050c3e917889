"""Compare logits with a recorded reference, and report the result as a Finding.

A reference is a small safetensors file next to the weights. It contains `tokens` (and `target` for an encoder-decoder,
`mask` if some tokens are padding) and the `logits` that a trusted implementation computed for them.
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
from glassformer.weights.folder import load, resolve
from glassformer.weights.tensors import Tensors

REFERENCE = "reference.safetensors"
# Measured over random models of every family: float32 stays below 1e-5 and float64 below 1e-12 times the largest logit.
# Half precision has 8 (bfloat16) or 11 (float16) significant bits, and about a dozen rounding errors add up.
BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 5e-1}


def compare_logits(
    name: str, ours: Tensor, reference: Tensor, bound: float, why: str, mask: Tensor | None = None
) -> Finding:
    """Measure the largest difference of two logit tensors. `mask` (B,T) excludes the logits of padding."""
    if ours.shape != reference.shape:
        raise WeightsError(
            f"logits of shape {tuple(ours.shape)} cannot be compared with a reference of {tuple(reference.shape)}: "
            "use the tokens and the vocabulary of the reference."
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
        remedy="check that config.json describes these weights and that the reference is of this model, then compare "
        "layer by layer.",
        logits_compared=int(gap.numel()),
        largest_logit=float(reference.abs().max()) if reference.numel() else 0.0,
    )


@torch.no_grad()
def same_logits(model: nn.Module, other: nn.Module, length: int = 16, seed: int = 0) -> Finding:
    """Compare the logits of two models on the same random tokens. The bound is 0: a conversion must not change them."""
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
    """Write a reference into the folder `path`, next to the weights, or to the file `path`."""
    file = Path(path) / REFERENCE if Path(path).is_dir() else Path(path)
    tensors = {"tokens": tokens, "logits": logits, "target": target, "mask": mask}
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    save_file({k: t.detach().cpu().contiguous() for k, t in tensors.items() if t is not None}, temporary)
    os.replace(temporary, file)  # an older reference stays intact until the new one is complete
    return file


@torch.no_grad()
def verify_folder(
    path: str | Path,
    reference_file: str | Path | None = None,
    bound: float | None = None,
    model: nn.Module | None = None,
) -> Finding:
    """Compare the logits of a model folder with its recorded reference. Without a reference the finding is a skip."""
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
