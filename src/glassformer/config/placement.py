"""What the ranks of tensor and context parallelism divide, and what they cannot. No torch.

`training.distributed.tensor` cuts a model by this table, and `sizing.plan` counts by it: a plan is what training does.
"""

import dataclasses
import fnmatch

from glassformer.config.experts import MoE
from glassformer.config.model import ModelConfig, Seq2SeqConfig
from glassformer.config.parts import Dense, Gated, NoFeedForward

TABLE = (
    ("*.attention.[qkv].weight", 0),
    ("*.attention.[qkv].bias", 0),
    ("*.attention.sinks", 0),
    ("*.attention.o.weight", 1),
    ("*.up.weight", 0),
    ("*.up.bias", 0),
    ("*.gate.weight", 0),
    ("*.gate.bias", 0),
    ("*.down.weight", 1),
    ("embed.tokens.weight", 0),
    ("head.weight", 0),
    ("head.bias", 0),
)
"""Patterns of names of parameters, and the dimension that is divided among the ranks. All others are on every rank."""


def cut_dimension(name: str) -> int | None:
    """Return the dimension of a parameter that is divided; None if every rank has all of it."""
    return next((dimension for pattern, dimension in TABLE if fnmatch.fnmatchcase(name, pattern)), None)


def is_of_vocabulary(name: str) -> bool:
    """Return whether the dimension of a parameter that is divided is the vocabulary: its parts may differ by one."""
    return name in ("embed.tokens.weight", "head.weight", "head.bias")


def indivisible(config: ModelConfig, size: int) -> str | None:
    """Return the number of the model that `size` ranks cannot divide, in words; None if they can divide all."""
    widths = {"heads": config.n_heads, "key/value heads": config.n_kv_heads}
    for layer in range(config.n_layers):
        spec = config.layer_feedforward(layer)
        spec = spec.expert if isinstance(spec, MoE) else spec
        if isinstance(spec, Dense | Gated):
            widths["hidden units (d_ff)"] = spec.d_ff
    return next((f"{number} {what}" for what, number in widths.items() if number % size), None)


def part_not_supported(config: ModelConfig) -> str | None:
    """Return the part of a model that tensor parallelism does not support; None if there is none."""
    attention = config.attention
    found = {
        "an encoder and a decoder": isinstance(config, Seq2SeqConfig),
        "latent attention": attention.latent is not None,
        "a norm over all queries or with a weight per head": (
            attention.qk_norm is not None and attention.qk_norm_over != "head"
        ),
        "biases on the scores (ALiBi, T5)": config.biases_scores,
        "blocks without feed-forwards": isinstance(config.feedforward, NoFeedForward),
    }
    return next((name for name, there in found.items() if there), None)


def sequence_not_supported(config: ModelConfig) -> str | None:
    """Return the part of a model that context parallelism does not support; None if there is none."""
    found = {
        "an encoder and a decoder": isinstance(config, Seq2SeqConfig),
        "biases on the scores (ALiBi, T5)": config.biases_scores,
        "rotary frequencies that depend on the length (LongRoPE)": config.changes_frequencies_at is not None,
    }
    return next((name for name, there in found.items() if there), None)


def divided(config: ModelConfig, size: int) -> ModelConfig:
    """Return the config of what one of `size` ranks holds: fewer heads and hidden units, the same residual stream."""

    def narrower(spec: Dense | Gated) -> Dense | Gated:
        return dataclasses.replace(spec, d_ff=spec.d_ff // size)

    spec = config.feedforward
    ff = dataclasses.replace(spec, expert=narrower(spec.expert)) if isinstance(spec, MoE) else spec
    ff = narrower(ff) if isinstance(ff, Dense | Gated) else ff
    heads, groups = config.n_heads // size, config.n_kv_heads // size
    attention = dataclasses.replace(config.attention, n_heads=heads, n_kv_heads=groups, d_head=config.d_head)
    return dataclasses.replace(config, attention=attention, feedforward=ff)
