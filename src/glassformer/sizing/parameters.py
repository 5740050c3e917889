"""Names and shapes of all parameters of a model, without building it. The names are those of docs/shapes.md."""

import math
from collections.abc import Iterator
from typing import assert_never

from glassformer.config import (
    Dense,
    EncoderConfig,
    FeedForward,
    Gated,
    Latent,
    LayerNorm,
    ModelConfig,
    MoE,
    NoFeedForward,
    RMSNorm,
    Seq2SeqConfig,
)

Shape = tuple[int, ...]

PARTS = ("embedding", "positions", "attention", "cross", "feedforward", "norms", "head", "pooler")


def stacks(config: ModelConfig) -> dict[str, int]:
    """Return the number of blocks of each stack, in the order of computation."""
    if isinstance(config, Seq2SeqConfig):
        return {"encoder": config.n_encoder_layers, "decoder": config.n_layers}
    return {"encoder" if isinstance(config, EncoderConfig) else "decoder": config.n_layers}


def first_layers(config: ModelConfig, n_layers: int) -> list[int]:
    """Return the first layer that uses each block of a stack: every layer, unless layers share blocks."""
    blocks = [config.block_of_layer(layer) for layer in range(n_layers)]
    return [layer for layer, block in enumerate(blocks) if block not in blocks[:layer]]


def parameters(config: ModelConfig) -> dict[str, Shape]:
    """Return the shape of every parameter by name. A tied head is the token table, which appears once."""
    return dict(_model(config))


def count(config: ModelConfig) -> int:
    """Return the number of parameters (scalars): 124,439,808 for GPT-2."""
    return sum(math.prod(shape) for shape in parameters(config).values())


def count_by_part(config: ModelConfig) -> dict[str, int]:
    """Return the number of parameters of each part, in the order of PARTS. The sum is `count`.

    Norms of the head belong to `head`, norms of queries and keys to their attention, all other norms to `norms`.
    """
    totals = dict.fromkeys(PARTS, 0)
    for name, shape in parameters(config).items():
        totals[part_of(name)] += math.prod(shape)
    return totals


def active(config: ModelConfig) -> int:
    """Return the number of parameters that one token uses: all except E - A experts in each block.

    The complete embedding table is counted, as in the published "12.9B active" of Mixtral.
    """
    return count(config) - sum(idle(config, n_blocks) for n_blocks in stacks(config).values())


def idle(config: ModelConfig, n_blocks: int) -> int:
    """Return the number of parameters in the experts of a stack that one token does not use."""
    parts = [config.layer_feedforward(layer) for layer in first_layers(config, n_blocks)]
    experts = [part for part in parts if isinstance(part, MoE)]
    return sum((part.n_experts - part.n_active) * expert_count(part.expert, config.d_model) for part in experts)


def expert_count(part: FeedForward, d_model: int) -> int:
    """Return the number of parameters of one feed-forward layer, or of one expert.

    2·D·F if dense (plus F + D with biases), 3·D·F if gated (plus 2·F + D); 0 without a feed-forward.
    """
    if isinstance(part, NoFeedForward):
        return 0
    return sum(math.prod(s) for _, s in _expert(part.expert if isinstance(part, MoE) else part, d_model))


def part_of(name: str) -> str:
    """Return the part to which a parameter belongs: one of PARTS."""
    if name.startswith("embed.") or ".project." in name:
        return "embedding"
    if name.startswith(("head.", "pooler.")):
        return name.split(".")[0]
    if ".position." in name or ".score_bias." in name:
        return "positions"
    for part in ("attention", "cross", "feedforward"):
        if f".{part}." in name:
            return part
    return "norms"


def _model(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    V, D = config.vocab_size, config.d_model
    yield "embed.tokens.weight", (V, config.embedding_width)
    if config.embedding.n_segments:
        yield "embed.segments.weight", (config.embedding.n_segments, config.embedding_width)
    for stack, n_blocks in stacks(config).items():
        yield from _prefixed(stack, _stack(config, n_blocks, cross=stack == "decoder" and len(stacks(config)) == 2))
    if config.head is not None:
        if config.head.has_transform:
            yield from _prefixed("head.transform", _linear(config.head_width, D, config.head.transform_bias))
        if config.head.transform is not None:
            yield from _prefixed("head.norm", _norm(config.norm, config.head_width))
        if not config.head.tied:
            yield "head.weight", (V, config.head_width)
        if config.head.bias:
            yield "head.bias", (V,)
    if isinstance(config, EncoderConfig) and config.pooler:
        yield from _prefixed("pooler", _linear(D, D, bias=True))


def _stack(config: ModelConfig, n_blocks: int, cross: bool) -> Iterator[tuple[str, Shape]]:
    D = config.d_model
    if table := config.position.table(config):
        yield "position.weight", tuple(table.values())
    if config.score_bias is not None:
        yield "score_bias.weight", tuple(config.score_bias.table(config).values())
    if config.embedding.norm:
        yield from _prefixed("embed_norm", _norm(config.norm, config.position_width))
    if config.embedding.width is not None:
        yield from _prefixed("project", _linear(D, config.embedding.width, config.embedding.project_bias))
    for index, layer in enumerate(first_layers(config, n_blocks)):
        yield from _prefixed(f"blocks.{index}", _block(config, cross, layer))
    if config.placement != "post":
        yield from _prefixed("norm", _norm(config.norm, D))


def _block(config: ModelConfig, cross: bool, layer: int) -> Iterator[tuple[str, Shape]]:
    D, part = config.d_model, config.layer_feedforward(layer)
    if config.placement == "parallel":
        yield from _prefixed("norm", _norm(config.norm, D))
    else:
        has_feedforward = not isinstance(part, NoFeedForward)
        branches = {"attention": config.has_attention_norm(layer), "cross": cross, "feedforward": has_feedforward}
        for name in (name for name, present in branches.items() if present):
            yield from _prefixed(f"norm_{name}", _norm(config.norm, D))
            if config.placement == "sandwich":
                yield from _prefixed(f"norm_{name}_out", _norm(config.norm, D))
    yield from _prefixed("attention", _attention(config))
    if cross:
        yield from _prefixed("cross", _attention(config))
    yield from _prefixed("feedforward", _feedforward(part, D))


def _attention(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    D, H, G, K, U = config.d_model, config.n_heads, config.n_kv_heads, config.d_head, config.d_value
    bias = config.attention.bias
    if config.attention.latent is not None:
        yield from _latent(config, config.attention.latent)
        return
    for name, width in (("q", H * K), ("k", G * K), ("v", G * U)):
        yield from _prefixed(name, _linear(width, D, bias))
    yield from _prefixed("o", _linear(D, H * U, config.out_bias))
    if config.attention.qk_norm is not None:
        for name, heads in (("q_norm", H), ("k_norm", G)):
            shape = {"head": (K,), "heads": (heads, K), "all": (heads * K,)}[config.attention.qk_norm_over]
            yield from _prefixed(name, _norm(config.attention.qk_norm, *shape))
    if config.attention.sinks:
        yield "sinks", (H,)


def _latent(config: ModelConfig, latent: Latent) -> Iterator[tuple[str, Shape]]:
    D, H, K, U, R, C = config.d_model, config.n_heads, config.d_head, config.d_value, latent.d_shared, latent.kv_rank
    bias = config.attention.bias
    if latent.q_rank is not None:
        yield from _prefixed("q_down", _linear(latent.q_rank, D, bias))
        yield from _prefixed("q_down_norm", _norm(latent.norm, latent.q_rank))
    yield from _prefixed("q", _linear(H * K, latent.q_rank or D, bias=False))
    yield from _prefixed("kv_down", _linear(C, D, bias))
    yield from _prefixed("kv_down_norm", _norm(latent.norm, C))
    yield from _prefixed("k_shared", _linear(R, D, bias))
    yield from _prefixed("k", _linear(H * (K - R), C, bias=False))
    yield from _prefixed("v", _linear(H * U, C, bias=False))
    yield from _prefixed("o", _linear(D, H * U, config.out_bias))
    if config.attention.sinks:
        yield "sinks", (H,)


def _feedforward(part: FeedForward, D: int) -> Iterator[tuple[str, Shape]]:
    match part:
        case MoE(n_experts=E, expert=expert):
            yield from _prefixed("router", _linear(E, D, part.router.bias))
            for index in range(E):
                yield from _prefixed(f"experts.{index}", _expert(expert, D))
            if part.shared is not None:
                yield from _prefixed("shared", _expert(part.shared, D))
            if part.shared_gate:
                yield from _prefixed("shared_gate", _linear(1, D, bias=False))
        case Dense() | Gated() as expert:
            yield from _expert(expert, D)
        case NoFeedForward():
            pass
        case _:
            assert_never(part)


def _expert(expert: Dense | Gated, D: int) -> Iterator[tuple[str, Shape]]:
    match expert:
        case Dense():
            names: tuple[str, ...] = ("up",)
        case Gated():
            names = ("up", "gate")
        case _:
            assert_never(expert)
    for name in names:
        yield from _prefixed(name, _linear(expert.d_ff, D, expert.bias))
    yield from _prefixed("down", _linear(D, expert.d_ff, expert.has_down_bias))


def _linear(n_out: int, n_in: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield "weight", (n_out, n_in)
    if bias:
        yield "bias", (n_out,)


def _norm(norm: LayerNorm | RMSNorm, *shape: int) -> Iterator[tuple[str, Shape]]:
    if norm.weight:
        yield "weight", shape
    match norm:
        case LayerNorm(bias=True):
            yield "bias", shape
        case LayerNorm() | RMSNorm():
            pass
        case _:
            assert_never(norm)


def _prefixed(prefix: str, items: Iterator[tuple[str, Shape]]) -> Iterator[tuple[str, Shape]]:
    for name, shape in items:
        yield f"{prefix}.{name}", shape
