"""The parameters of a model: names and shapes, random values for tests, and validation of a parameter dict.

The names and shapes are implemented from the table in docs/shapes.md, independently of `glassformer.model`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

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
    Norm,
    Seq2SeqConfig,
    T5Bias,
)
from glassformer.reference.arrays import Params

Shapes = dict[str, tuple[int, ...]]


def shapes(config: ModelConfig) -> Shapes:
    """Return the shape of every parameter by name. The weight of a linear layer is (out, in)."""
    V, D = config.vocab_size, config.d_model
    table: Shapes = {"embed.tokens.weight": (V, embedding_width(config))}
    if config.embedding.n_segments:
        table["embed.segments.weight"] = (config.embedding.n_segments, embedding_width(config))
    if isinstance(config, Seq2SeqConfig):
        table |= _stack(config, "encoder", cross=False)
        table |= _stack(config, "decoder", cross=True)
    else:
        table |= _stack(config, stack_name(config), cross=False)
    if config.head is not None:
        W = config.head.width if config.head.width is not None else D
        if config.head.transform is not None or config.head.width is not None:
            table |= _linear("head.transform", W, D, bias=config.head.transform_bias)
        if config.head.transform is not None:
            table |= _norm(config.norm, "head.norm", W)
        if not config.head.tied:
            table["head.weight"] = (V, W)
        if config.head.bias:
            table["head.bias"] = (V,)
    if isinstance(config, EncoderConfig) and config.pooler:
        table |= _linear("pooler", D, D, bias=True)
    return table


def embedding_width(config: ModelConfig) -> int:
    """Return the width of the token and segment tables: D, unless the embedding is factorized."""
    return config.d_model if config.embedding.width is None else config.embedding.width


def position_width(config: ModelConfig) -> int:
    """Return the width at which positions are added and the embedding is normed: before or after the projection."""
    return embedding_width(config) if config.embedding.project == "after_norm" else config.d_model


def block_index(config: ModelConfig, layer: int) -> int:
    """Return the index of the block whose parameters a layer uses. Layers may share a block (Lan et al. 2020)."""
    return layer if config.shared_blocks is None else config.shared_blocks[layer]


def stack_name(config: ModelConfig) -> str:
    """Return the name of the only stack: `encoder` in an encoder-only model, `decoder` in a decoder-only model."""
    return "encoder" if isinstance(config, EncoderConfig) else "decoder"


def layer_count(config: ModelConfig, stack: str) -> int:
    """Return the number of blocks of a stack, `encoder` or `decoder`."""
    if isinstance(config, Seq2SeqConfig) and stack == "encoder":
        return config.n_encoder_layers
    return config.n_layers


def _stack(config: ModelConfig, stack: str, cross: bool) -> Shapes:
    D = config.d_model
    table: Shapes = {}
    if (learned := config.learned_positions) is not None:
        assert config.max_len is not None  # the config rejects learned positions without it
        table[f"{stack}.position.weight"] = (config.max_len + learned.offset, position_width(config))
    if isinstance(config.position, T5Bias):
        table[f"{stack}.position.weight"] = (config.position.buckets, config.n_heads)
    if config.score_bias is not None:
        table[f"{stack}.score_bias.weight"] = (config.score_bias.buckets, config.n_heads)
    if config.embedding.norm:
        table |= _norm(config.norm, f"{stack}.embed_norm", position_width(config))
    if config.embedding.width is not None:
        table |= _linear(f"{stack}.project", D, config.embedding.width, config.embedding.project_bias)
    for layer in range(layer_count(config, stack)):
        block = f"{stack}.blocks.{block_index(config, layer)}"
        part = config.layer_feedforward(layer)
        branches = ["attention"] + ["cross"] * cross + ["feedforward"] * (not isinstance(part, NoFeedForward))
        if config.placement == "parallel":
            table |= _norm(config.norm, f"{block}.norm", D)
        else:
            for branch in branches:
                if branch != "attention" or layer > 0 or config.first_norm:
                    table |= _norm(config.norm, f"{block}.norm_{branch}", D)
                if config.placement == "sandwich":
                    table |= _norm(config.norm, f"{block}.norm_{branch}_out", D)
        table |= _attention(config, f"{block}.attention")
        if cross:
            table |= _attention(config, f"{block}.cross")
        table |= _feedforward(part, f"{block}.feedforward", D)
    if config.placement != "post":
        table |= _norm(config.norm, f"{stack}.norm", D)
    return table


def _norm(norm: Norm, name: str, *shape: int) -> Shapes:
    width = shape[-1]
    table: Shapes = {f"{name}.weight": shape} if norm.weight else {}
    if isinstance(norm, LayerNorm) and norm.bias:
        table[f"{name}.bias"] = (width,)
    return table


def _linear(name: str, d_out: int, d_in: int, bias: bool) -> Shapes:
    table: Shapes = {f"{name}.weight": (d_out, d_in)}
    if bias:
        table[f"{name}.bias"] = (d_out,)
    return table


def _attention(config: ModelConfig, name: str) -> Shapes:
    D, H, G, K, U = config.d_model, config.n_heads, config.n_kv_heads, config.d_head, config.d_value
    bias, qk_norm = config.attention.bias, config.attention.qk_norm
    if config.attention.latent is not None:
        return _latent(config, config.attention.latent, name)
    table = _linear(f"{name}.q", H * K, D, bias)
    table |= _linear(f"{name}.k", G * K, D, bias)
    table |= _linear(f"{name}.v", G * U, D, bias)
    table |= _linear(f"{name}.o", D, H * U, config.out_bias)
    if qk_norm is not None:
        for part, heads in (("q", H), ("k", G)):
            shape = {"head": (K,), "heads": (heads, K), "all": (heads * K,)}[config.attention.qk_norm_over]
            table |= _norm(qk_norm, f"{name}.{part}_norm", *shape)
    if config.attention.sinks:
        table[f"{name}.sinks"] = (H,)
    return table


def _latent(config: ModelConfig, latent: Latent, name: str) -> Shapes:
    D, H, K, U, R, C = config.d_model, config.n_heads, config.d_head, config.d_value, latent.d_shared, latent.kv_rank
    bias = config.attention.bias
    table: Shapes = {}
    if latent.q_rank is not None:
        table |= _linear(f"{name}.q_down", latent.q_rank, D, bias)
        table |= _norm(latent.norm, f"{name}.q_down_norm", latent.q_rank)
    table |= _linear(f"{name}.q", H * K, latent.q_rank or D, bias=False)
    table |= _linear(f"{name}.kv_down", C, D, bias) | _norm(latent.norm, f"{name}.kv_down_norm", C)
    table |= _linear(f"{name}.k_shared", R, D, bias)
    table |= _linear(f"{name}.k", H * (K - R), C, bias=False) | _linear(f"{name}.v", H * U, C, bias=False)
    table |= _linear(f"{name}.o", D, H * U, config.out_bias)
    if config.attention.sinks:
        table[f"{name}.sinks"] = (H,)
    return table


def _feedforward(part: FeedForward, name: str, D: int) -> Shapes:
    if isinstance(part, NoFeedForward):
        return {}
    if isinstance(part, MoE):
        table = _linear(f"{name}.router", part.n_experts, D, part.router.bias)
        if part.router.correction:
            table[f"{name}.router.correction"] = (part.n_experts,)
        for expert in range(part.n_experts):
            table |= _expert(part.expert, f"{name}.experts.{expert}", D)
        if part.shared is not None:
            table |= _expert(part.shared, f"{name}.shared", D)
        if part.shared_gate:
            table |= _linear(f"{name}.shared_gate", 1, D, bias=False)
        return table
    return _expert(part, name, D)


def _expert(feedforward: Dense | Gated, name: str, D: int) -> Shapes:
    F, bias = feedforward.d_ff, feedforward.bias
    table = _linear(f"{name}.up", F, D, bias) | _linear(f"{name}.down", D, F, feedforward.has_down_bias)
    if isinstance(feedforward, Gated):
        table |= _linear(f"{name}.gate", F, D, bias)
    return table


def random_params(config: ModelConfig, seed: int = 0, std: float = 0.3) -> Params:
    """Return random parameters for tests: normal values with standard deviation `std`; norm weights have mean 1.

    Do not train from these values. Biases are not 0 and norm weights are not 1, so that a test detects a bias that is
    added twice or a norm weight that is left out.
    """
    generator = np.random.default_rng(seed)
    params: Params = {}
    for name, shape in shapes(config).items():
        values = std * generator.standard_normal(shape)
        owner, kind = name.split(".")[-2:]
        params[name] = 1 + values if "norm" in owner and kind == "weight" else values
    return params


def as_params(config: ModelConfig, params: Mapping[str, Any]) -> Params:
    """Return `params` in float64.

    Raises:
        ValueError: a name is missing or unknown, or a shape does not match the config.
    """
    expected = shapes(config)
    missing, unknown = sorted(set(expected) - set(params)), sorted(set(params) - set(expected))
    if missing or unknown:
        raise ValueError(f"the parameters do not match the config: missing {missing}, unknown {unknown}.")
    arrays = {name: np.asarray(params[name], dtype=np.float64) for name in expected}
    for name, shape in expected.items():
        if arrays[name].shape != shape:
            raise ValueError(f"{name} has shape {arrays[name].shape}, but the config requires {shape}.")
    return arrays
