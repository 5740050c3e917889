"""Every initial distribution, in one table, and `build`, which makes a model with them."""

import fnmatch
import math
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from glassformer import config as c
from glassformer.config import presets
from glassformer.model.transformer import DecoderLM, EncoderLM, Model, Seq2Seq

# Pattern of the parameter's name -> distribution. First match wins; a name that matches none is an error.
#   normal: N(0, init_std^2);  residual: N(0, (init_std / sqrt(number of residual branches))^2), so that the stream's
#   variance does not grow with depth (Radford et al. 2019, 2.3);  one, zero: constants. The weight of a norm with an
#   offset starts at one minus the offset.
TABLE: tuple[tuple[str, str], ...] = (
    ("*norm*.weight", "one"),
    ("*.bias", "zero"),
    ("*.sinks", "zero"),
    ("*.blocks.*.o.weight", "residual"),
    ("*.blocks.*.down.weight", "residual"),
    ("*.blocks.*.weight", "normal"),
    ("embed.*.weight", "normal"),
    ("*.position.weight", "normal"),
    ("head.*weight", "normal"),
    ("pooler.weight", "normal"),
)


def build(
    config: c.ModelConfig | str,
    seed: int = 0,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Model:
    """A model with fresh weights. The same config and seed give the same weights, whatever the device or dtype.

    `config` is a ModelConfig or the name of a preset, such as "gpt2".
    It comes in evaluation mode (no dropout), as a loaded one does; `model.train()` switches. On device "meta" nothing
    is allocated: shapes only.
    """
    if isinstance(config, str):
        config = presets.get(config)
    with torch.device("meta"), _Unfilled():
        model = _construct(config)
    model = model.to(dtype).eval()
    if torch.device(device).type == "meta":
        return model
    model = model.to_empty(device=device)
    init_weights(model, seed)
    return model


class _Unfilled(TorchFunctionMode):
    """Modules are made without their own first values, which TABLE replaces.

    On the meta device torch would import its compiler, a second, to do nothing.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return None
        return func(*args, **(kwargs or {}))


def _construct(config: c.ModelConfig) -> Model:
    match config:
        case c.DecoderConfig():
            return DecoderLM(config)
        case c.EncoderConfig():
            return EncoderLM(config)
        case c.Seq2SeqConfig():
            return Seq2Seq(config)
    raise TypeError(
        f"cannot build a model from {type(config).__name__}: give a DecoderConfig, EncoderConfig or Seq2SeqConfig, or "
        "the name of a preset."
    )


@torch.no_grad()
def init_weights(model: Model, seed: int) -> None:
    """Fill every parameter from TABLE, drawing on the CPU in float32 so that devices and dtypes agree."""
    config = model.config
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        kind = distribution(name)
        if kind in ("one", "zero"):
            offset = getattr(model.get_submodule(name.rpartition(".")[0]), "offset", 0.0)
            parameter.fill_(1.0 - offset if kind == "one" else 0.0)
            continue
        std = config.init_std
        if kind == "residual":
            std /= math.sqrt(_residual_branches(config, name))
        parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))
    for buffer in model.buffers():  # corrections of routers
        buffer.zero_()


def distribution(name: str) -> str:
    """The entry of TABLE that a parameter's name falls under."""
    for pattern, kind in TABLE:
        if fnmatch.fnmatchcase(name, pattern):
            return kind
    raise KeyError(f"parameter {name} matches no row of the table of initial distributions")


def _residual_branches(config: c.ModelConfig, name: str) -> int:
    """How many branches are added to the stream that this parameter writes to."""
    per_block = 1 if isinstance(config.feedforward, c.NoFeedForward) else 2
    if isinstance(config, c.Seq2SeqConfig):
        if name.startswith("encoder."):
            return per_block * config.n_encoder_layers
        return (per_block + 1) * config.n_layers
    return per_block * config.n_layers


def n_parameters(model: nn.Module) -> int:
    """Scalars in the model; a shared (tied) tensor counts once."""
    return sum(p.numel() for p in model.parameters())
