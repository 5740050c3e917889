"""What the decode kernels of a CPU and of a GPU share: the config fields they implement, and position tables."""

from typing import Any

import torch
from torch import Tensor

from glassformer import config as c
from glassformer.kernels.registry import POSITION_FIELDS, Rule, any_values, unsupported_field
from glassformer.model import DecoderLM
from glassformer.model.positions import Learned, Rotary, Sinusoidal, alibi_slopes, sinusoids

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "relu2", "tanh")
"""In the order of their numbers in pointwise.h and rows.cuh."""
ALLOWED: dict[str, Rule] = {
    **any_values("vocab_size d_model n_layers max_len dropout init_std"),
    "attention": {"Attention"},
    **any_values("attention.n_heads attention.n_kv_heads attention.d_head attention.d_value attention.scale"),
    **any_values("attention.bias attention.out_bias attention.window attention.window_layers"),
    "feedforward": {"dense", "gated"},
    "feedforward.activation": ACTIVATIONS,
    **any_values("feedforward.d_ff feedforward.bias"),
    "norm": {"layer_norm", "rms_norm"},
    **any_values("norm.eps norm.bias"),
    "position": {"none", "learned", "sinusoidal", "rotary"},
    **POSITION_FIELDS,
    "placement": {"pre"},
    "embedding": {"Embedding"},
    **any_values("embedding.scale"),
    "head": {"Head"},
    **any_values("head.tied head.bias head.scale"),
    "special": {"Special"},
    **any_values("special.bos special.eos special.pad special.start"),
    **any_values("special.forced_bos special.forced_eos special.suppressed"),
}
"""The config fields that all decode kernels implement. Each kernel may add to them."""


def unsupported_config(config: c.ModelConfig, allowed: dict[str, Rule]) -> str | None:
    """Return why a decode kernel with these allowed fields cannot run a model of this config, or None if it can."""
    if not isinstance(config, c.DecoderConfig):
        return "only decoder-only models have decode kernels"
    return unsupported_field(config, allowed)


def position_tables(model: DecoderLM, capacity: int) -> dict[str, Tensor]:
    """Return the tables of a position scheme for `capacity` positions; none where the scheme needs none.

    `position_table` (N,D) is added to the embeddings, `cosines` and `sines` (N,R/2) rotate, `slopes` (H) are ALiBi's.
    """
    scheme: Any = model.decoder.position
    positions = torch.arange(capacity, device=model.device)
    match scheme:
        case Learned():
            return {"position_table": scheme.weight.detach()[scheme.offset :]}
        case Sinusoidal():
            return {"position_table": sinusoids(positions, model.config.d_model, scheme.spec)}
        case Rotary():
            return dict(zip(("cosines", "sines"), scheme.table(positions, torch.float32), strict=True))
        case _ if isinstance(model.config.position, c.Alibi):
            return {"slopes": torch.tensor(alibi_slopes(model.config.n_heads))}
        case _:
            return {}
