"""A model as the CUDA kernels read it: matrices of all layers stacked, position tables, sizes as macros."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glassformer import config as c
from glassformer.kernels import decode_support
from glassformer.kernels.decode_support import ACTIVATIONS
from glassformer.kernels.toolchain import nvrtc
from glassformer.model import DecoderLM
from glassformer.model.block import Block
from glassformer.model.layers import LayerNorm
from glassformer.model.positions import Learned, Rotary, Sinusoidal
from glassformer.shapes import Float

ENDLESS = 2**30
"""The window of a layer without a window."""
DTYPES = {"float32": torch.float32, "float16": torch.float32, "bfloat16": torch.bfloat16}
"""The dtypes in which the kernels keep weights of each precision."""
SHARED = ("sizes.cuh", "machine.cuh", "rows.cuh", "keys.cuh")
"""The parts of the source that both kinds of kernels begin with."""
ALLOWED = dict(decode_support.ALLOWED)
"""The config fields that the CUDA kernels implement."""


@lru_cache(64)  # each generation asks again
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
    blocks = [block for block in model.blocks if isinstance(block, Block)]

    def stacked(*names: str) -> Tensor:
        modules: list[list[Any]] = [[block.get_submodule(name) for name in names] for block in blocks]
        rows = [torch.cat([module.weight for module in row]) for row in modules]
        return torch.stack(rows).to(dtype).contiguous()

    def shifts(*names: str) -> Tensor:
        def one(block: Block, name: str) -> Tensor:
            module: Any = block.get_submodule(name)
            bias = getattr(module, "bias", None)
            return module.weight.new_zeros(module.weight.shape[0]) if bias is None else bias

        return torch.stack([torch.cat([one(block, name) for name in names]) for block in blocks]).float().contiguous()

    assert model.head is not None
    gated = isinstance(model.config.feedforward, c.Gated)
    projections = ("attention.q", "attention.k", "attention.v")
    ups = ("feedforward.up", "feedforward.gate") if gated else ("feedforward.up",)
    last: Any = model.decoder.norm
    zeros = last.weight.new_zeros(1).float()
    table = model.embed.tokens.weight
    return {
        "table": table.to(dtype).contiguous(),
        "head": (table if model.head.weight is None else model.head.weight).to(dtype).contiguous(),
        "head_bias": zeros if model.head.bias is None else model.head.bias.float(), "head_scale": model.head.scale,
        "norm_a": _norms(blocks, "norm_attention", "weight"),
        "norm_a_bias": _norms(blocks, "norm_attention", "bias"),
        "norm_f": _norms(blocks, "norm_feedforward", "weight"),
        "norm_f_bias": _norms(blocks, "norm_feedforward", "bias"),
        "last_norm": last.weight.float().contiguous(),
        "last_norm_bias": zeros if getattr(last, "bias", None) is None else last.bias.float().contiguous(),
        "w_qkv": stacked(*projections), "b_qkv": shifts(*projections),
        "w_out": stacked("attention.o"), "b_out": shifts("attention.o"),
        "w_up": stacked(*ups), "b_up": shifts(*ups),
        "w_down": stacked("feedforward.down"), "b_down": shifts("feedforward.down"),
    }  # fmt: skip


def _norms(blocks: list[Block], name: str, what: str) -> Float[Tensor, "L D"]:
    """Return the weight or bias of a norm in every layer; zeros if it has none."""
    norms: list[Any] = [block.get_submodule(name) for block in blocks]
    found = [getattr(norm, what, None) for norm in norms]
    rows = [n.weight.new_zeros(n.weight.shape) if t is None else t for n, t in zip(norms, found, strict=True)]
    return torch.stack(rows).float().contiguous()
