"""All model families: detect the family of a folder, choose one for a config, and convert in both directions."""

import dataclasses
import math
from collections.abc import Container, Iterator, Mapping
from typing import Any, NamedTuple

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
from glassformer.errors import nearest
from glassformer.model import build
from glassformer.weights import convert
from glassformer.weights.encoders import ENCODERS
from glassformer.weights.encoders.bert import BERT, DISTILBERT, ROBERTA
from glassformer.weights.errors import SAVE_AS_GLASS, WeightsError
from glassformer.weights.family import Family, Source
from glassformer.weights.hf import DECODERS, llama
from glassformer.weights.hf.gpt2 import GPT2
from glassformer.weights.not_supported import NOT_SUPPORTED
from glassformer.weights.rope import fold_ntk
from glassformer.weights.seq2seq import SEQ2SEQ
from glassformer.weights.seq2seq.t5 import T5
from glassformer.weights.tensors import Tensors

FAMILIES: tuple[Family, ...] = (*DECODERS, *ENCODERS, *SEQ2SEQ)
"""Every family. The order matters for saving: the first that can represent a config is used."""


def detect_family(source: Source) -> Family:
    """Return the family of a folder.

    `model_type` decides, and keys and tensor names must not contradict it. Without a `model_type` the keys of
    config.json and the names of the tensors decide, for families that they identify.
    """
    given = source.data.get("model_type")
    if given is None:
        fitting = [f for f in FAMILIES if not f.needs_type and all(key in source.data for key in f.keys)]
    else:
        fitting = [f for f in FAMILIES if given in f.types and all(key in source.data for key in f.keys)]
    if not fitting:
        raise unknown_architecture(source)
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
            "set model_type in config.json."
        )
    return fitting[0]


def unknown_architecture(source: Source) -> WeightsError:
    """Return the error for a config.json of no family: why, and which model types are near."""
    given, types = source.data.get("model_type"), [kind for family in FAMILIES for kind in family.types]
    if isinstance(given, str) and given in NOT_SUPPORTED:
        return WeightsError(f"config.json has model_type={given!r}, which cannot be loaded: {NOT_SUPPORTED[given]}.")
    about = f"model_type={given!r}, architectures={source.data.get('architectures')!r}"
    family = next((family for family in FAMILIES if given in family.types), None)
    if family is not None:
        lacking = ", ".join(key for key in family.keys if key not in source.data)
        return WeightsError(
            f"config.json describes an unknown architecture: {about} (it lacks {lacking}): add what is missing."
        )
    near = nearest(str(given), types, "Supported model types are")
    return WeightsError(
        f"config.json describes an unknown architecture: {about}. Other architectures compute something else even with "
        f"the same tensor names, so only verified ones are loaded.{near}"
    )


def _has_names_of(family: Family, names: list[str]) -> bool:
    marked = any(prefix + mark in names for mark in family.typical_names for prefix in ("", family.prefix))
    return marked and not any(name.startswith(family.excluded_prefixes) for name in names if family.excluded_prefixes)


def read_config(source: Source) -> tuple[Family, ModelConfig]:
    """Return the family and the config of a folder."""
    family = detect_family(source)
    if source.tensors is not None and family.update_name is not None:
        source.tensors = source.tensors.rename(family.update_name)
    try:
        config = family.read(source)
    except ConfigError as error:
        raise WeightsError(f"config.json does not describe a valid model: {error}") from None
    if source.tensors is not None:
        check_sizes(config, source.tensors, source.prefix(family.prefix) + family.embed)
    return family, config


def check_sizes(config: ModelConfig, tensors: Tensors, embed: str) -> None:
    """Check vocabulary size and layer count early, for a clearer error than the per-tensor check gives.

    This also prevents building a model of millions of layers from a wrong config.json.
    """
    if embed in tensors and (rows := tensors.shape(embed)[0]) != config.vocab_size:
        raise WeightsError(
            f"config.json has vocab_size={config.vocab_size}, but the token table {embed} has {rows} rows: correct "
            "config.json or the weights, they must be equal."
        )
    layers = config.n_layers if config.shared_blocks is None else len(set(config.shared_blocks))
    layers += config.n_encoder_layers if isinstance(config, Seq2SeqConfig) else 0
    if layers > len(tensors):
        raise WeightsError(
            f"config.json has {layers} layers, but the weights contain only {len(tensors)} tensors: correct "
            "config.json or the weights."
        )
    stored = sum(math.prod(tensors.shape(name)) for name in tensors)
    experts = sum(part.n_experts * part.expert.d_ff for part in _experts(config)) * config.d_model
    if experts > 2 * stored:  # two numbers in a byte are the densest format
        raise WeightsError(
            f"config.json has {layers} layers with experts of {experts:,} weights, but the weights contain only "
            f"{stored:,} numbers: correct config.json or the weights."
        )


def _experts(config: ModelConfig) -> Iterator[MoE]:
    for layer in range(config.n_layers):
        if isinstance(part := config.layer_feedforward(layer), MoE):
            yield part


def from_hf(
    source: Source, dtype: torch.dtype | None = None, device: str | torch.device = "cpu", copy: bool = True
) -> tuple[Family, ModelConfig, dict[str, Tensor]]:
    """Return family, config and state dict of a Hugging Face folder. Notes are added to `source.notes`."""
    family, config = read_config(source)
    assert source.tensors is not None
    prefix, rows = source.prefix(family.prefix), family.rows(config)
    moves = convert.plan(rows, convert.shapes(config), prefix)
    state, notes = convert.read(source.tensors, moves, rows, family.drops, prefix, dtype, device, copy)
    source.notes += notes
    return family, config, state


def choose(config: ModelConfig) -> Family:
    """Return the plainest family for the parts of a config. `to_hf` checks the remaining fields."""
    if isinstance(config.feedforward, NoFeedForward):
        raise WeightsError(f"an attention-only model has no Hugging Face family: {SAVE_AS_GLASS}.")
    match config, config.position:
        case DecoderConfig(), Learned():
            return GPT2
        case DecoderConfig(), Rotary():
            return llama.FAMILY
        case EncoderConfig(), Learned(offset=offset):
            return ROBERTA if offset else BERT if config.embedding.n_segments else DISTILBERT
        case EncoderConfig() | Seq2SeqConfig(), T5Bias():
            return T5
    raise WeightsError(
        f"position={type(config.position).__name__} in a {type(config).__name__} has no Hugging Face family: "
        f"{SAVE_AS_GLASS}, or use learned or rotary positions (decoder), learned (encoder) or T5 bias (seq2seq)."
    )


def to_hf(
    config: ModelConfig, state: Mapping[str, Tensor], prefer: str = "", among: Container[str] | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json and the tensors under the names of a family: the first that can represent the config.

    The family named `prefer` is tried first, then the plainest one, then all others; with `among`, those of these model
    types only. A family can represent a config if it reads back what it wrote. If none can, the error is that of the
    plainest family and names the field.
    """
    _, written = _first_family(config, state, prefer, among)
    return written.data, convert.write(written.state, written.moves)


def config_json(
    config: ModelConfig, state: Mapping[str, Tensor], among: Container[str] | None = None
) -> dict[str, Any]:
    """Return the config.json that `to_hf` returns, without its tensors."""
    return _first_family(config, state, "", among)[1].data


def moves_to_hf(config: ModelConfig, prefer: str = "") -> tuple[Family, list[convert.Move]]:
    """Return the family that `to_hf` would use, and its names and layouts of the tensors of a config."""
    state = build(config, device="meta").state_dict()
    family, _ = _first_family(config, state, prefer)
    targets = {name: tuple(tensor.shape) for name, tensor in state.items()}
    prefix = family.prefix if config.head is not None else ""
    return family, convert.plan(family.rows(config), targets, prefix, strict=False)


class _Written(NamedTuple):
    """A model as a family has it, before its tensors are converted."""

    data: dict[str, Any]
    """config.json."""
    state: Mapping[str, Tensor]
    """Ours, with every bias that the family has."""
    moves: list[convert.Move]


def _first_family(
    config: ModelConfig, state: Mapping[str, Tensor], prefer: str, among: Container[str] | None = None
) -> tuple[Family, _Written]:
    refused: WeightsError | None = None
    try:
        plainest = [choose(config)]
    except WeightsError as error:
        refused, plainest = error, []
    preferred = [family for family in FAMILIES if family.name == prefer]
    others = [family for family in FAMILIES if family.needs_type and isinstance(config, family.kinds)]
    for family in dict.fromkeys([*preferred, *plainest, *others]):
        try:
            written = _write_as(family, config, state)
            if among is None or written.data["model_type"] in among:
                return family, written
        except (WeightsError, ConfigError) as error:
            if refused is None and family in plainest:
                refused = error if isinstance(error, WeightsError) else WeightsError(str(error))
    raise refused or WeightsError("none of the model types can represent this config.")


def _write_as(family: Family, config: ModelConfig, state: Mapping[str, Tensor]) -> _Written:
    """Return a model as one family has it; raise WeightsError if it cannot represent the config.

    The config is read back immediately. A field that reads back differently cannot be represented, and the error names
    it.
    """
    if family.add_biases is not None:
        config = family.add_biases(config)
        state = with_biases(config, state)
    data = family.write(config)
    prefix, rows = family.prefix if config.head is not None else "", family.rows(config)
    targets = {name: tuple(tensor.shape) for name, tensor in state.items()}
    first = {name: shape for name, shape in targets.items() if ".blocks." not in name or ".blocks.0." in name}
    names = _Names({move.theirs for move in convert.plan(rows, first, prefix, strict=False)})
    back = family.read(Source(dict(data), names))  # type: ignore[arg-type]
    if field := difference(config, back):
        wanted, got = arithmetic(config).get(field), arithmetic(back).get(field)
        raise WeightsError(
            f"{field}={wanted!r} cannot be written as {family.name}, which would read it as {got!r}: {SAVE_AS_GLASS}."
        )
    return _Written(data, state, convert.plan(rows, targets, prefix))


def with_biases(config: ModelConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict with zeros for the biases of the config that it does not have."""
    like = next(iter(state.values()))
    missing = {name: shape for name, shape in convert.shapes(config).items() if name not in state}
    return {**state, **{name: like.new_zeros(shape) for name, shape in missing.items() if name.endswith(".bias")}}


class _Names(set[str]):
    """Names of the tensors of a file that is not written yet: the part of `Tensors` that reading a config uses."""

    def equal(self, a: str, b: str) -> bool:
        return False  # only an untied head is written


def arithmetic(config: ModelConfig) -> dict[str, Any]:
    """Return all fields of a config that change what the model computes, with defaults filled in."""
    parts = to_dict(config)
    for name in ("dropout", "init_std", "special", "max_len", "attention", "layer_kinds"):
        parts.pop(name, None)
    parts["head"] = parts.get("head", "none")
    parts["shared_blocks"] = [config.block_of_layer(layer) for layer in range(config.n_layers)]
    attention = dataclasses.asdict(config.attention)
    for name in ("window", "window_layers"):
        attention.pop(name)
    attention |= {"n_kv_heads": config.n_kv_heads, "d_head": config.d_head, "d_value": config.d_value}
    attention |= {"scale": config.scale, "out_bias": config.out_bias}
    attention["qk_norm"] = None if config.attention.qk_norm is None else to_dict(config.attention.qk_norm)
    parts["position"] = [_plain_position(config, layer) for layer in range(config.n_layers)]
    parts["feedforward"] = [to_dict(config.layer_feedforward(layer)) for layer in range(config.n_layers)]
    if len({str(part) for part in parts["position"] + parts["feedforward"]}) == 2:
        parts |= {name: parts[name][0] for name in ("position", "feedforward")}
    if isinstance(config.position, Learned):
        parts["max_len"] = config.max_len
    parts |= {f"attention.{name}": value for name, value in attention.items()}
    parts["attention.window"] = [config.window(layer) for layer in range(config.n_layers)]
    return parts


def _plain_position(config: ModelConfig, layer: int) -> dict[str, Any]:
    position = config.layer_position(layer)
    return to_dict(fold_ntk(position, config.d_head) if isinstance(position, Rotary) else position)


def difference(wanted: ModelConfig, got: ModelConfig, tolerance: float = 1e-12) -> str | None:
    """Return the first field that makes the two models compute differently; None if there is none.

    `tolerance` is the relative difference of numbers that count as equal.
    """
    a, b = arithmetic(wanted), arithmetic(got)
    return next((key for key in [*a, *b] if not _same(a.get(key), b.get(key), tolerance)), None)


def _same(a: Any, b: Any, tolerance: float) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_same(x, y, tolerance) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key], tolerance) for key in a)
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=tolerance)
    return bool(a == b)
