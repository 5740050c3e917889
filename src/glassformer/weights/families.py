"""All families: which one a folder belongs to, which one can hold a config, and the way there and back."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from glassformer.config import (
    ConfigError,
    DecoderConfig,
    EncoderConfig,
    Learned,
    ModelConfig,
    MoE,
    NoFeedForward,
    Rotary,
    Seq2SeqConfig,
    T5Bias,
    to_dict,
)
from glassformer.model import build
from glassformer.weights import convert
from glassformer.weights.bert import BERT, ROBERTA
from glassformer.weights.convert import Shape
from glassformer.weights.distilbert import DISTILBERT
from glassformer.weights.errors import IN_OURS, WeightsError
from glassformer.weights.family import Family, Source
from glassformer.weights.gpt2 import GPT2
from glassformer.weights.llama import LLAMA
from glassformer.weights.rope import fold_ntk
from glassformer.weights.t5 import T5
from glassformer.weights.tensors import Tensors

FAMILIES = (GPT2, BERT, ROBERTA, DISTILBERT, T5, LLAMA)
SUPPORTED = ", ".join(kind for family in FAMILIES for kind in family.types)


def recognise(source: Source) -> Family:
    """The family of a folder, by the keys of config.json and the names of its tensors.

    `model_type` is not what decides, but a value that was never verified is refused, and it breaks the tie where keys
    and names are equally those of two families (a BERT and a RoBERTa without a head).
    """
    given = source.data.get("model_type")
    fitting = [family for family in FAMILIES if all(key in source.data for key in family.keys)]
    if given is not None:
        fitting = [family for family in fitting if given in family.types]
    if not fitting:
        known = any(given in family.types for family in FAMILIES)
        lacking = ""
        if known:
            family = next(family for family in FAMILIES if given in family.types)
            lacking = f" (it lacks {', '.join(key for key in family.keys if key not in source.data)})"
        raise WeightsError(
            f"config.json describes an unknown architecture: model_type={given!r}, "
            f"architectures={source.data.get('architectures')!r}{lacking}. Supported model types are {SUPPORTED}."
        )
    if source.data.get("quantization_config") is not None:
        raise WeightsError("config.json has quantization_config: quantised weights must be dequantised before loading.")
    if source.tensors is not None:
        names = list(source.tensors)
        fitting = [family for family in fitting if _has_names_of(family, names)]
        if not fitting:
            raise WeightsError(
                f"the tensors ({', '.join(sorted(names)[:3])}, ...) are not named like those of a "
                f"{given or 'known'} model: config.json does not describe this file, or it is incomplete."
            )
    if len(fitting) > 1:
        raise WeightsError(
            f"the folder could be {' or '.join(family.name for family in fitting)}, which compute differently: "
            "say which with model_type in config.json."
        )
    return fitting[0]


def _has_names_of(family: Family, names: list[str]) -> bool:
    marked = any(prefix + mark in names for mark in family.marks for prefix in ("", family.prefix))
    return marked and not any(name.startswith(family.foreign) for name in names if family.foreign)


def shapes(config: ModelConfig) -> dict[str, Shape]:
    """Names and shapes of all parameters of a config; nothing is allocated."""
    return {name: tuple(tensor.shape) for name, tensor in build(config, device="meta").state_dict().items()}


def read_config(source: Source) -> tuple[Family, ModelConfig]:
    """The family and our config of a folder."""
    family = recognise(source)
    if source.tensors is not None and family.respell is not None:
        source.tensors = source.tensors.rename(family.respell)
    try:
        config = family.read(source)
    except ConfigError as error:
        raise WeightsError(f"config.json cannot be built: {error}") from None
    if source.tensors is not None:
        _check_sizes(config, source.tensors, source.prefix(family.prefix) + family.embed)
    return family, config


def _check_sizes(config: ModelConfig, tensors: Tensors, embed: str) -> None:
    """What is told better before the tensors are compared one by one, and before ten million layers are built."""
    if embed in tensors and (rows := tensors.shape(embed)[0]) != config.vocab_size:
        raise WeightsError(
            f"config.json has vocab_size={config.vocab_size}, but the token table {embed} has {rows} rows: they must "
            "be equal, correct config.json or the weights."
        )
    layers = config.n_layers + (config.n_encoder_layers if isinstance(config, Seq2SeqConfig) else 0)
    parts = layers * (config.feedforward.n_experts if isinstance(config.feedforward, MoE) else 1)
    if parts > len(tensors):
        raise WeightsError(
            f"config.json asks for {layers} layers ({parts} feed-forwards), but the weights hold {len(tensors)} "
            "tensors in all: correct config.json or the weights."
        )


def from_hf(
    source: Source, dtype: torch.dtype | None = None, device: str | torch.device = "cpu", copy: bool = True
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Our config and state dict out of a foreign folder; notices go to `source.notes`."""
    family, config = read_config(source)
    assert source.tensors is not None
    prefix, rows = source.prefix(family.prefix), family.rows(config)
    moves = convert.plan(rows, shapes(config), prefix)
    state, notes = convert.read(source.tensors, moves, rows, family.drops, prefix, dtype, device, copy)
    source.notes += notes
    return config, state


def choose(config: ModelConfig) -> Family:
    """The family whose parts a config has. Its smaller fields are checked by `to_hf`."""
    if isinstance(config.feedforward, NoFeedForward):
        raise WeightsError(f"a model of attention only has no Hugging Face family: {IN_OURS}.")
    match config, config.position:
        case DecoderConfig(), Learned():
            return GPT2
        case DecoderConfig(), Rotary():
            return LLAMA
        case EncoderConfig(), Learned(offset=offset):
            return ROBERTA if offset else BERT if config.embedding.n_segments else DISTILBERT
        case EncoderConfig() | Seq2SeqConfig(), T5Bias():
            return T5
    raise WeightsError(
        f"position={type(config.position).__name__} in a {type(config).__name__} has no Hugging Face family: "
        f"{IN_OURS}, or use learned or rotary positions (decoder), learned (encoder) or T5 bias (seq2seq)."
    )


def to_hf(config: ModelConfig, state: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors in the family's names.

    The config is read back at once: a field that comes back different cannot be expressed and is refused by name.
    """
    family = choose(config)
    if family.widen is not None:
        config = family.widen(config)
        like = next(iter(state.values()))
        added = {n: like.new_zeros(s) for n, s in shapes(config).items() if n not in state and n.endswith(".bias")}
        state = {**state, **added}
    data = family.write(config)
    prefix, rows = family.prefix if config.head is not None else "", family.rows(config)
    targets = {name: tuple(tensor.shape) for name, tensor in state.items()}
    names = _Names({move.theirs for move in convert.plan(rows, targets, prefix, strict=False)})
    back = family.read(Source(dict(data), names))  # type: ignore[arg-type]
    if field := difference(config, back):
        wanted, got = arithmetic(config).get(field), arithmetic(back).get(field)
        raise WeightsError(
            f"{field}={wanted!r} cannot be written as {family.name}, which would read it as {got!r}: {IN_OURS}."
        )
    return data, convert.write(state, convert.plan(rows, targets, prefix))


class _Names(set[str]):
    """The names of a file that is yet to be written, as far as reading a config looks at its tensors."""

    def equal(self, a: str, b: str) -> bool:
        return False  # a head that is written at all is not tied


def arithmetic(config: ModelConfig) -> dict[str, Any]:
    """Everything in a config that changes what is computed, its defaults filled in."""
    parts = to_dict(config)
    for name in ("dropout", "init_std", "special", "max_len", "attention"):
        parts.pop(name, None)
    parts["head"] = parts.get("head", "none")
    attention = dataclasses.asdict(config.attention)
    for name in ("window", "window_layers"):
        attention.pop(name)
    attention |= {"n_kv_heads": config.n_kv_heads, "d_head": config.d_head, "d_value": config.d_value}
    attention |= {"scale": config.scale, "out_bias": config.out_bias}
    attention["qk_norm"] = None if config.attention.qk_norm is None else to_dict(config.attention.qk_norm)
    if isinstance(config.position, Rotary):
        parts["position"] = to_dict(fold_ntk(config.position, config.d_head))
    if isinstance(config.position, Learned):
        parts["max_len"] = config.max_len
    parts |= {f"attention.{name}": value for name, value in attention.items()}
    parts["attention.window"] = [config.window(layer) for layer in range(config.n_layers)]
    return parts


def difference(wanted: ModelConfig, got: ModelConfig) -> str | None:
    """The first field that would compute differently, or None."""
    a, b = arithmetic(wanted), arithmetic(got)
    return next((key for key in [*a, *b] if not _same(a.get(key), b.get(key))), None)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-12)
    return bool(a == b)
