"""Model configs: frozen dataclasses that are validated when they are made. This package does not import torch.

A variant is a type, not a flag: the position scheme is one of `Position`, the feed-forward one of `FeedForward`, the
norm one of `Norm`. A variant has no fields that do not apply to it. All values are plain, so a config goes to a dict
(`to_dict`), to TOML (`to_toml`) and back (`from_dict`, `from_toml`) without loss.

The letters are the alphabet of docs/shapes.md: D width, H query heads, G key/value heads, K query/key width of a head,
U value width, F feed-forward width, E experts, A active experts, L layers, V vocabulary, W window.
"""

from glassformer.config.experts import FeedForward, MoE, Router
from glassformer.config.model import (
    MODEL_KINDS,
    DecoderConfig,
    EncoderConfig,
    LayerKind,
    ModelConfig,
    Placement,
    Seq2SeqConfig,
)
from glassformer.config.parts import (
    Activation,
    Attention,
    Dense,
    Embedding,
    Gated,
    Head,
    Latent,
    LayerNorm,
    NoFeedForward,
    Norm,
    RMSNorm,
    Special,
)
from glassformer.config.position import (
    Alibi,
    Learned,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    NoPosition,
    NTKScaling,
    Position,
    QueryKeyPosition,
    Rotary,
    RotaryScaling,
    Sinusoidal,
    T5Bias,
    YarnScaling,
)
from glassformer.config.schema import (
    build,
    from_dict,
    from_toml,
    replace,
    to_dict,
    to_toml,
)
from glassformer.errors import (
    ConfigError,
)

__all__ = [
    "MODEL_KINDS",
    "Activation",
    "Alibi",
    "Attention",
    "ConfigError",
    "DecoderConfig",
    "Dense",
    "Embedding",
    "EncoderConfig",
    "FeedForward",
    "Gated",
    "Head",
    "Latent",
    "LayerKind",
    "LayerNorm",
    "Learned",
    "LinearScaling",
    "Llama3Scaling",
    "LongScaling",
    "MoE",
    "ModelConfig",
    "NTKScaling",
    "NoFeedForward",
    "NoPosition",
    "Norm",
    "Placement",
    "Position",
    "QueryKeyPosition",
    "RMSNorm",
    "Rotary",
    "RotaryScaling",
    "Router",
    "Seq2SeqConfig",
    "Sinusoidal",
    "Special",
    "T5Bias",
    "YarnScaling",
    "build",
    "from_dict",
    "from_toml",
    "replace",
    "to_dict",
    "to_toml",
]
