"""The functions that are exported: a model with tensors for all of its inputs, the KV cache included."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from glassformer.model import DecoderLM, EncoderLM, Seq2Seq
from glassformer.model.cache import Cache, Growing
from glassformer.model.context import NO_TAP
from glassformer.model.latent import LatentAttention
from glassformer.model.moe import MoE, Router

BATCH, TOKENS, PAST, SOURCE = 2, 3, 5, 7
"""Sizes of the examples. They differ from each other and from 0 and 1, which the exporter would take as constants."""


@dataclass(frozen=True)
class Graph:
    """One ONNX file: a function, example inputs, and the names of inputs and outputs with their dynamic dimensions."""

    file: str
    function: nn.Module
    inputs: dict[str, Tensor]
    outputs: list[str]
    dynamic: dict[str, dict[int, str]]
    """Input -> dimension -> its name."""


def graphs_of(model: nn.Module) -> list[Graph]:
    """Return the graphs of a model."""
    match model:
        case DecoderLM():
            return [_decoder(model)]
        case EncoderLM():
            return [_encoder(model)]
        case Seq2Seq():
            return [_source_encoder(model), _target_decoder(model)]
        case _:
            raise TypeError(type(model))


def _ids(length: int) -> Tensor:
    return torch.ones(BATCH, length, dtype=torch.long)


def _filled(keys: list[Tensor], n_layers: int) -> Cache:
    """Return a cache with these keys and values; it has no positions and no mask yet."""
    cache = Cache(keys[0].device)
    for layer in range(n_layers):
        store = Growing()
        store.k, store.v = keys[2 * layer], keys[2 * layer + 1]
        cache.layers.append(store)
    cache.length = keys[0].shape[2]
    return cache


def _stored(cache: Cache) -> list[Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.k, layer.v)]  # type: ignore[attr-defined]


class CachedDecoder(nn.Module):
    """Logits of new tokens, and the keys and values of all tokens so far."""

    def __init__(self, model: DecoderLM):
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past: list[Tensor]
    ) -> tuple[Tensor, ...]:
        model, real = self.model, attention_mask.bool()
        cache = _filled(past, model.config.n_layers)
        counted = (attention_mask.cumsum(1) - 1).clamp(min=0)
        cache.positions, cache.real = counted[:, : cache.length], real[:, : cache.length]
        new = real[:, cache.length :]
        hidden = model.decoder(model.embed(input_ids), new, position_ids, cache)
        return (hidden if model.head is None else model.logits(hidden), *_stored(cache))


def _decoder(model: DecoderLM) -> Graph:
    names = [f"{i}.{part}" for i in range(model.config.n_layers) for part in ("key", "value")]
    inputs = {"input_ids": _ids(TOKENS), "attention_mask": _ids(PAST + TOKENS), "position_ids": _ids(TOKENS)}
    dynamic = {"input_ids": {0: "batch", 1: "sequence"}, "attention_mask": {0: "batch", 1: "total"}}
    dynamic |= {"position_ids": {0: "batch", 1: "sequence"}}
    for name, tensor in zip(names, _past(model), strict=True):
        inputs[f"past_key_values.{name}"] = tensor
        dynamic[f"past_key_values.{name}"] = {0: "batch", 2: "past"}
    outputs = ["logits" if model.head is not None else "last_hidden_state", *(f"present.{name}" for name in names)]
    return Graph("model.onnx", CachedDecoder(model), inputs, outputs, dynamic)


def _past(model: DecoderLM | Seq2Seq, length: int = PAST) -> list[Tensor]:
    config, latent = model.config, model.config.attention.latent
    heads, widths = config.n_kv_heads, (config.d_head, config.d_value)
    if latent is not None:
        heads, widths = 1, (latent.d_shared, latent.kv_rank)
    return [torch.zeros(BATCH, heads, length, width) for _ in range(config.n_layers) for width in widths]


class Encoder(nn.Module):
    """Logits, or hidden states if there is no head; and the pooled vector of the first token if there is a pooler."""

    def __init__(self, model: EncoderLM):
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        model = self.model
        hidden = model.encoder(model.embed(input_ids, token_type_ids), attention_mask.bool())
        first = hidden if model.head is None else model.logits(hidden)
        return (first,) if model.pooler is None else (first, model.pool(hidden))


def _encoder(model: EncoderLM) -> Graph:
    inputs = {"input_ids": _ids(SOURCE), "attention_mask": _ids(SOURCE)}
    if model.embed.segments is not None:
        inputs["token_type_ids"] = _ids(SOURCE) * 0
    outputs = ["last_hidden_state" if model.head is None else "logits"]
    outputs += [] if model.pooler is None else ["pooler_output"]
    return Graph("model.onnx", Encoder(model), inputs, outputs, {n: {0: "batch", 1: "sequence"} for n in inputs})


class SourceEncoder(nn.Module):
    """The hidden states of a source, and the keys and values that cross-attention reads."""

    def __init__(self, model: Seq2Seq):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        model = self.model
        hidden = model.encoder(model.embed(input_ids), attention_mask.bool())
        pairs = [block.cross.project_kv(hidden) for block in model.decoder.blocks]  # type: ignore[union-attr, operator]
        return (hidden, *(tensor for pair in pairs for tensor in pair))


def _source_encoder(model: Seq2Seq) -> Graph:
    inputs = {"input_ids": _ids(SOURCE), "attention_mask": _ids(SOURCE)}
    names = [f"present.{i}.encoder.{part}" for i in range(model.config.n_layers) for part in ("key", "value")]
    dynamic = {name: {0: "batch", 1: "source"} for name in inputs}
    return Graph("encoder_model.onnx", SourceEncoder(model), inputs, ["last_hidden_state", *names], dynamic)


class TargetDecoder(nn.Module):
    """Logits of new target tokens, and the keys and values of all target tokens so far."""

    def __init__(self, model: Seq2Seq):
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, encoder_attention_mask: Tensor, past: list[Tensor], cross: list[Tensor]
    ) -> tuple[Tensor, ...]:
        model = self.model
        cache = _filled(past, model.config.n_layers)
        cache.cross = [(cross[2 * i], cross[2 * i + 1]) for i in range(model.config.n_layers)]
        source_mask = encoder_attention_mask.bool()
        hidden = model.decoder(model.embed(input_ids), None, None, cache, memory_mask=source_mask)
        return (hidden if model.head is None else model.logits(hidden), *_stored(cache))


def _target_decoder(model: Seq2Seq) -> Graph:
    names = [f"{i}.{{}}.{part}" for i in range(model.config.n_layers) for part in ("key", "value")]
    inputs = {"input_ids": _ids(TOKENS), "encoder_attention_mask": _ids(SOURCE)}
    dynamic = {"input_ids": {0: "batch", 1: "sequence"}, "encoder_attention_mask": {0: "batch", 1: "source"}}
    for side, length, dimension in (("decoder", PAST, "past"), ("encoder", SOURCE, "source")):
        for name, tensor in zip(names, _past(model, length), strict=True):
            inputs[f"past_key_values.{name.format(side)}"] = tensor
            dynamic[f"past_key_values.{name.format(side)}"] = {0: "batch", 2: dimension}
    outputs = ["logits" if model.head is not None else "last_hidden_state"]
    outputs += [f"present.{name.format('decoder')}" for name in names]
    return Graph("decoder_model.onnx", TargetDecoder(model), inputs, outputs, dynamic)


class DenseMoE(MoE):
    """A mixture of experts in which every expert computes every token: a graph cannot choose what it computes.

    The gates of the experts that are not chosen are 0, so the sum is the same. It shares the modules of `moe`.
    """

    def __init__(self, moe: MoE):
        nn.Module.__init__(self)
        _share(self, moe)
        self.router = TopKRouter(moe.router)

    def mix(self, x: Tensor, gates: Tensor, choice: Tensor) -> Tensor:
        every = gates.new_zeros(*gates.shape[:-1], len(self.experts))
        weights = every.scatter(-1, choice, gates)
        mixed: Tensor = sum(weights[..., e, None] * expert(x, NO_TAP) for e, expert in enumerate(self.experts))
        return mixed


class TopKRouter(Router):
    """A router for ONNX, which has no stable sort; its TopK takes the lowest index of equal scores, too."""

    def __init__(self, router: Router):
        nn.Module.__init__(self)
        _share(self, router)

    def largest(self, scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
        values, indices = scores.topk(count)
        return values, indices


def _share(module: nn.Module, other: nn.Module) -> None:
    """Give a module the parameters, submodules and attributes of another one."""
    held = {name: dict(value) if isinstance(value, dict) else value for name, value in other.__dict__.items()}
    module.__dict__.update(held)


@contextlib.contextmanager
def with_dense_experts(model: nn.Module) -> Iterator[bool]:
    """Replace mixtures of experts while the block runs; yield whether there are any."""
    found = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in list(parent.named_children())
        if isinstance(child, MoE)
    ]
    try:
        for parent, name, child in found:
            setattr(parent, name, DenseMoE(child))
        yield bool(found)
    finally:
        for parent, name, child in found:
            setattr(parent, name, child)


@contextlib.contextmanager
def with_expanded_keys(model: nn.Module) -> Iterator[None]:
    """Let latent attention expand keys and values while the block runs, whatever their number: a graph has one form."""
    found = [module for module in model.modules() if isinstance(module, LatentAttention)]
    limits = [module.absorbs_below for module in found]
    try:
        for module in found:
            module.absorbs_below = 0.0
        yield
    finally:
        for module, limit in zip(found, limits, strict=True):
            module.absorbs_below = limit
