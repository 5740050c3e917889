"""Random tiny transformers models with nothing at its default, and the comparison every family test makes.

Dimensions differ and are prime where the architecture allows. Every parameter gets noise, so a bias or a norm that is
forgotten shows. In float64 the reference really computes in float64: transformers writes float32 into its norms, its
softmax and its rotary angles, which `AllDouble` replaces while the model is built and run.
"""

import contextlib
import inspect
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode

from glassformer.weights import load, save

B, T, V = 3, 11, 97
LENGTHS = (11, 7, 4)
# float32: measured below 2e-5 over all families with logits up to about 30; the requirement is 1e-4. float64: 1e-9.
BOUND = {torch.float32: 1e-4, torch.float64: 1e-9}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
PADDING = pytest.mark.parametrize("side", ["none", "right", "left"])


class AllDouble(TorchFunctionMode):
    """Every float32 that code asks for by name becomes float64. `.float()` of integers stays (T5's buckets need it)."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float and args[0].dtype == torch.float64:
            return args[0]
        double = {torch.float32: torch.float64}
        args = tuple(double.get(a, a) if isinstance(a, torch.dtype) else a for a in args)
        kwargs = {k: double.get(v, v) if isinstance(v, torch.dtype) else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


def precision(dtype):
    return AllDouble() if dtype == torch.float64 else contextlib.nullcontext()


def random_model(cls, config, dtype=torch.float32, seed=0, attention="eager"):
    """A transformers model of a class and config, noise in every parameter, in evaluation mode."""
    config._attn_implementation, config._experts_implementation = attention, "eager"
    with precision(dtype):
        model = cls(config).to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # as wide as keeps the stream of order 1, so that rounding is not amplified by a badly scaled model
            width = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
            noise = width * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            is_scale = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(noise + 1 if is_scale else noise)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):  # of a router; zero in a new model
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator, dtype=torch.float64))
    return model


def saved(model, path):
    model.save_pretrained(path)
    return path


def batch(side, vocab=V, low=3, pad=1, seed=1, length=T):
    """Tokens, boolean mask and positions that count real tokens; padding places hold the id `pad`."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(low, vocab, (B, length), generator=generator)
    lengths = torch.tensor([length if side == "none" else max(n * length // T, 1) for n in LENGTHS])
    index = torch.arange(length)[None]
    mask = index >= length - lengths[:, None] if side == "left" else index < lengths[:, None]
    return tokens.masked_fill(~mask, pad), mask, (mask.long().cumsum(1) - 1).clamp(min=0)


def gap(ours, theirs, mask):
    """Largest difference over real places."""
    return float((ours - theirs).abs()[mask].max())


@torch.no_grad()
def logits_of(model, side, dtype):
    """The logits of transformers; models that take position ids get those that count real tokens."""
    tokens, mask, positions = batch(side)
    takes = "position_ids" in inspect.signature(model.forward).parameters
    with precision(dtype):
        return model(tokens, attention_mask=mask.long(), **({"position_ids": positions} if takes else {})).logits


@torch.no_grad()
def decoder_gap(model, folder, side, dtype):
    """Our logits against transformers' for one padding; positions are given to transformers, derived here."""
    tokens, mask, _ = batch(side)
    theirs = logits_of(model, side, dtype)
    ours = load(folder)(tokens, mask=None if side == "none" else mask)
    assert ours.dtype == dtype
    return gap(ours, theirs, mask)


@torch.no_grad()
def round_trip(model, folder, tmp_path, run, ignore=(), attention="eager"):
    """load, save(format="hf"), transformers again: the same tensors under the same names, and the same output."""
    out = save(load(folder), tmp_path / "out")
    ours, theirs = load_file(out / "model.safetensors"), load_file(Path(folder) / "model.safetensors")
    assert {name for name in theirs if not (ignore and name.startswith(ignore))} == set(ours)
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor, theirs[name]), name
    again = reopen(out, attention)
    # The tensors are equal bit for bit; products still round differently with the alignment of their memory (3e-5
    # measured in float32 for one transformers model against its own copy).
    first, second = run(model), run(again)
    assert (first - second).abs().max() <= BOUND[first.dtype]
    return out


def reopen(folder, attention="eager"):
    """What transformers makes of a folder of ours; anything missing or left over is an error."""
    cls = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
    model, info = cls.from_pretrained(folder, output_loading_info=True, attn_implementation=attention)
    model.config._experts_implementation = "eager"
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    return model.eval()


def edit(folder, name="config.json", **changes):
    """Change keys of a JSON file; a value of ... removes the key."""
    file = Path(folder) / name
    data = json.loads(file.read_text()) if file.exists() else {}
    data.update(changes)
    file.write_text(json.dumps({k: v for k, v in data.items() if v is not ...}))
