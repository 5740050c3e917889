"""Small models in which every parameter matters: no bias is 0 and no norm weight is 1, so an omission is visible."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from glassformer import config as c
from glassformer.lens.trace import trace
from glassformer.model import Cache, DecoderLM, EncoderLM, Model, Seq2Seq, build
from glassformer.model.context import NO_TAP, Tap
from glassformer.model.transformer import Mask
from glassformer.reference import random_params
from glassformer.reference.arrays import Params
from glassformer.shapes import Bool, Float, Int

SEQUENCE = (3, 1, 4, 0, 2, 6, 5, 3)
"""Tokens to read, of a vocabulary of 7 or more."""


def small_config(kind: type[c.ModelConfig] = c.DecoderConfig, n_layers: int = 2, **changes: Any) -> c.ModelConfig:
    """A Transformer of width 8 with two heads; `changes` are fields of its config."""
    fields: dict[str, Any] = {
        "vocab_size": 7,
        "d_model": 8,
        "attention": c.Attention(2),
        "feedforward": c.Dense(16),
        "position": c.Sinusoidal(),
        **changes,
    }
    if kind is c.Seq2SeqConfig:
        fields.setdefault("n_encoder_layers", n_layers)
    return kind(n_layers=n_layers, **fields)


Config = TypeVar("Config", bound=c.ModelConfig)


def one_layer(kind: type[Config], **fields: Any) -> Config:
    """The config of one block of attention without feed-forward and positions; `fields` are those of the config."""
    return kind(**{
        "vocab_size": 2, "n_layers": 1, "feedforward": c.NoFeedForward(), "position": c.NoPosition(), **fields,
    })  # fmt: skip


def random_model(config: c.ModelConfig, seed: int = 0, std: float = 0.5, dtype: torch.dtype = torch.float64) -> Model:
    """Return a model with the oracle's random values for every parameter."""
    return model_with(config, random_params(config, seed, std), dtype)


def model_with(config: c.ModelConfig, params: Params, dtype: torch.dtype = torch.float64) -> Model:
    """Return a model with these parameters, which have the same names in the oracle."""
    model = build(config, dtype=dtype)
    model.load_state_dict({name: torch.from_numpy(value).to(dtype) for name, value in params.items()})
    return model


def decoder(n_layers: int = 2, seed: int = 0, std: float = 0.5, **changes: Any) -> DecoderLM:
    model = random_model(small_config(c.DecoderConfig, n_layers, **changes), seed, std)
    assert isinstance(model, DecoderLM)
    return model


def encoder(n_layers: int = 2, seed: int = 0, std: float = 0.5, **changes: Any) -> EncoderLM:
    model = random_model(small_config(c.EncoderConfig, n_layers, **changes), seed, std)
    assert isinstance(model, EncoderLM)
    return model


def seq2seq(n_layers: int = 2, seed: int = 0, std: float = 0.5, **changes: Any) -> Seq2Seq:
    model = random_model(small_config(c.Seq2SeqConfig, n_layers, **changes), seed, std)
    assert isinstance(model, Seq2Seq)
    return model


Positions = Int[Tensor, "#B T"] | None
Inputs = tuple[Mask, Positions]


class ChangedInputs(DecoderLM):
    """A decoder that receives changed arguments: the fault is in `changed`, everything else is the model itself."""

    def changed(self, tokens: Int[Tensor, "B T"], mask: Mask, positions: Positions, cache: Cache | None) -> Inputs:
        """Return the mask and the positions that the model receives."""
        return mask, positions

    def encode(
        self,
        tokens: Int[Tensor, "B T"],
        mask: Mask = None,
        positions: Positions = None,
        segments: Int[Tensor, "#B T"] | None = None,
        cache: Cache | None = None,
        tap: Tap = NO_TAP,
    ) -> Float[Tensor, "B T D"]:
        mask, positions = self.changed(tokens, mask, positions, cache)
        return super().encode(tokens, mask, positions, segments, cache, tap)


def random_tokens(rng: np.random.Generator, rows: int, length: int, vocab_size: int) -> Int[Tensor, "B T"]:
    return torch.from_numpy(rng.integers(0, vocab_size, size=(rows, length)))


def full_mask(tokens: Int[Tensor, "B T"]) -> Bool[Tensor, "B T T"]:
    """Return the mask (B,T,T) that allows every pair of tokens; as `mask=` it removes the causal mask."""
    rows, length = tokens.shape
    return torch.ones(rows, length, length, dtype=torch.bool)


def refusal(call: Callable[..., Any], *given: Any, **named: Any) -> str:
    """Return the message of the ValueError that a call raises, or an empty string if it raises none."""
    try:
        with torch.no_grad():
            call(*given, **named)
    except ValueError as error:
        return str(error)
    return ""


def dependence(model: Model, tokens: Int[Tensor, "B T"], read: str = "embed", **given: Any) -> Float[Tensor, "T S"]:
    """max |d logits_i / d x_j| of the first row, x_j the vector of token j where it enters (site `read`)."""
    run = trace(model, tokens[:1], sites=[read], grad=True, **given)
    rows = []
    for logits in run.logits[0]:  # (V,)
        gradients = [torch.autograd.grad(logit, run[read], retain_graph=True)[0][0] for logit in logits]
        rows.append(torch.stack(gradients).abs().amax((0, 2)))
    return torch.stack(rows)


def unmasked(model: DecoderLM) -> EncoderLM:
    """Return the same weights without the causal mask: a decoder becomes an encoder."""
    fields = {field.name: getattr(model.config, field.name) for field in dataclasses.fields(model.config)}
    twin = build(c.EncoderConfig(**fields), dtype=model.embed.tokens.weight.dtype)
    twin.load_state_dict({n.replace("decoder.", "encoder.", 1): v for n, v in model.state_dict().items()})
    assert isinstance(twin, EncoderLM)
    return twin
