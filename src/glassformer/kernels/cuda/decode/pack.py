"""A model as the CUDA kernels read it: matrices of all layers stacked, position tables, sizes as macros."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glassformer import config as c
from glassformer.kernels import decode_support
from glassformer.kernels.decode_support import ACTIVATIONS
from glassformer.kernels.registry import remembered
from glassformer.kernels.toolchain import nvrtc
from glassformer.model import DecoderLM
from glassformer.model.block import Block
from glassformer.model.layers import LayerNorm
from glassformer.model.positions import Learned, Rotary, Sinusoidal

ENDLESS = 2**30
"""The window of a layer without a window."""
DTYPES = {"float32": torch.float32, "float16": torch.float32, "bfloat16": torch.bfloat16}
"""The dtypes in which the kernels keep weights of each precision."""
SHARED = ("sizes.cuh", "machine.cuh", "rows.cuh", "keys.cuh")
"""The parts of the source that both kinds of kernels begin with."""
ALLOWED = dict(decode_support.ALLOWED)
"""The config fields that the CUDA kernels implement."""


@remembered(64)
def unsupported_config(config: c.ModelConfig) -> str | None:
    """Return why the CUDA kernels cannot run a model of this config, or None if they can."""
    if (reason := decode_support.unsupported_config(config, ALLOWED)) is not None:
        return reason
    if config.d_head != config.d_value or config.d_head not in (16, 32, 64, 128):
        return f"d_head={config.d_head} and d_value={config.d_value} are not supported: both must be 16, 32, 64 or 128"
    if any(n % 8 for n in (config.d_model, config.d_ff)):
        return f"d_model={config.d_model} and d_ff={config.d_ff} are not supported: both must be multiples of 8"
    if config.d_model > 4096 or config.d_ff > 8192:
        return (
            f"d_model={config.d_model} and d_ff={config.d_ff} do not fit a block's shared memory: the limits are "
            "4,096 and 8,192"
        )
    return None


def source(sizes: Mapping[str, int], parts: tuple[str, ...], instead: Mapping[str, str] | None = None) -> str:
    """Return the source for a model of these sizes. `instead` replaces parts, for the emulation in tests."""
    return nvrtc.source(Path(__file__).parent, (*SHARED, *parts), sizes, instead)


def position_tables(model: DecoderLM, capacity: int) -> dict[str, Tensor]:
    """Return the position tables, as long as the cache; a single zero in place of a table that is not needed."""
    empty = dict.fromkeys(("position_table", "cosines", "sines"), torch.zeros(1, device=model.device))
    tables = decode_support.position_tables(model, capacity)
    return empty | {name: table.float().contiguous() for name, table in tables.items()}


def kernel_sizes(model: DecoderLM, dtype: torch.dtype, warps: int) -> dict[str, int]:
    """Return the macros that the kernels are compiled with."""
    cfg, norm = model.config, model.decoder.norm
    scheme: Any = model.decoder.position
    feed = cfg.feedforward
    assert isinstance(feed, c.Dense | c.Gated)
    rotary, gated = isinstance(scheme, Rotary), isinstance(feed, c.Gated)
    return {
        "L": cfg.n_layers, "D": cfg.d_model, "H": cfg.n_heads, "G": cfg.n_kv_heads, "K": cfg.d_head,
        "U": cfg.d_value, "F": cfg.d_ff, "V": cfg.vocab_size, "WARPS": warps,
        "HALF": int(dtype is torch.bfloat16), "ADDS_POSITIONS": int(isinstance(scheme, Learned | Sinusoidal)),
        "ROTATED": scheme.d_rotated if rotary else 0,
        "HALVES": int(rotary and scheme.spec.pairing == "halves"), "GATED": int(gated),
        "ACTIVATION": ACTIVATIONS.index(feed.activation), "CENTRED": int(isinstance(norm, LayerNorm)),
        "SHIFTED": int(getattr(norm, "bias", None) is not None), "BIASED": int(_biased(model)),
    }  # fmt: skip


def _biased(model: DecoderLM) -> bool:
    return any(module.bias is not None for module in model.modules() if isinstance(module, torch.nn.Linear))


@torch.no_grad()
def stacked_weights(model: DecoderLM, dtype: torch.dtype) -> dict[str, Any]:
    """Matrices of all layers stacked, in `dtype`; norms and biases in float32, a missing bias as zeros."""

    def stacked(what: str, *names: str) -> Tensor:
        """Return the weight or bias of modules of all blocks (L, n, ...), modules of one block one below the other."""

        def one(module: Any) -> Tensor:
            held: Tensor | None = getattr(module, what, None)
            return module.weight.new_zeros(len(module.weight)) if held is None else held

        blocks = (block for block in model.blocks if isinstance(block, Block))
        return torch.stack([torch.cat([one(block.get_submodule(name)) for name in names]) for block in blocks])

    assert model.head is not None
    gated = isinstance(model.config.feedforward, c.Gated)
    matrices = {
        "qkv": ("attention.q", "attention.k", "attention.v"), "out": ("attention.o",),
        "up": ("feedforward.up", "feedforward.gate") if gated else ("feedforward.up",), "down": ("feedforward.down",),
    }  # fmt: skip
    norms = {"norm_a": "norm_attention", "norm_f": "norm_feedforward"}
    last: Any = model.decoder.norm
    table, zeros = model.embed.tokens.weight, last.weight.new_zeros(1)
    return {
        "table": table.to(dtype).contiguous(),
        "head": (table if model.head.weight is None else model.head.weight).to(dtype).contiguous(),
        "head_bias": (zeros if model.head.bias is None else model.head.bias).float(), "head_scale": model.head.scale,
        "last_norm": last.weight.float().contiguous(),
        "last_norm_bias": (zeros if last.bias is None else last.bias).float().contiguous(),
        **{name: stacked("weight", norm).float() for name, norm in norms.items()},
        **{f"{name}_bias": stacked("bias", norm).float() for name, norm in norms.items()},
        **{f"w_{name}": stacked("weight", *modules).to(dtype) for name, modules in matrices.items()},
        **{f"b_{name}": stacked("bias", *modules).float() for name, modules in matrices.items()},
    }  # fmt: skip
