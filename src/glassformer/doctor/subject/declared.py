"""What a model says about itself: the facts of its config, whatever they are called there.

A convention (scale, eps, activation, tying, window, rotary base) can only be called wrong against a declaration. Here
the spellings in common use are read into one record; what is not declared stays None and is never guessed.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

NAMES: dict[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size", "n_vocab", "vocab", "num_tokens", "n_tokens", "padded_vocab_size", "vocabulary"),
    "d_model": ("d_model", "hidden_size", "n_embd", "dim", "width", "embed_dim", "n_embed", "emb_dim", "model_dim"),
    "n_layers": (
        "n_layers", "num_hidden_layers", "n_layer", "num_layers", "layers", "depth", "decoder_layers",
        "num_decoder_layers",
    ),
    "n_heads": ("n_heads", "num_attention_heads", "n_head", "num_heads", "heads", "decoder_attention_heads"),
    "n_kv_heads": ("n_kv_heads", "num_key_value_heads", "n_kv_head", "kv_heads", "n_groups", "num_kv_heads"),
    "d_head": ("d_head", "head_dim", "head_size", "d_kv"),
    "max_len": (
        "max_len", "max_position_embeddings", "block_size", "n_positions", "context_length", "n_ctx", "context",
        "max_seq_len", "max_length", "max_positions", "max_sequence_length", "ctx_len", "seq_len", "max_context", "ctx",
    ),
    "window": ("window", "sliding_window", "window_size", "attention_window", "attn_window", "local_window"),
    "tied": ("tied", "tie_word_embeddings", "tie_weights", "tie_embeddings", "weight_tying", "tie", "tied_head",
             "tie_head",
             "share_embeddings", "tied_embeddings"),
    "activation": ("activation", "hidden_act", "activation_function", "hidden_activation", "act", "act_fn",
                   "mlp_activation",
                   "feed_forward_proj", "ffn_activation", "dense_act_fn"),
    "eps": ("eps", "layer_norm_eps", "rms_norm_eps", "norm_eps", "layer_norm_epsilon", "ln_eps", "norm_epsilon",
            "layernorm_eps", "layernorm_epsilon"),
    "norm": ("norm", "norm_type", "normalization", "norm_kind", "normalization_type"),
    "placement": ("placement", "norm_placement", "norm_position", "norm_order", "pre_norm", "prenorm", "norm_first",
                  "norm_style", "do_layer_norm_before"),
    "position": ("position", "position_type", "positions", "pos", "pos_type", "position_embedding_type", "pos_emb",
                 "positional", "position_encoding", "pos_encoding", "positional_encoding", "position_embedding",
                 "pos_embedding", "pe"),
    "rope_base": ("rope_base", "rope_theta", "rotary_base", "rope_base_frequency", "rotary_emb_base", "theta"),
    "rope_pairing": ("rope_pairing", "pairing", "rope_style", "rotary_style", "rope_layout", "rope_interleaved",
                     "rotary_interleaved", "interleaved"),
    "rope_fraction": ("rope_fraction", "partial_rotary_factor", "rotary_pct", "rotary_fraction"),
    "scale": ("scale", "attn_scale", "attention_scale", "softmax_scale", "scaling", "attention_multiplier", "qk_scale"),
    "dropout": ("dropout", "resid_pdrop", "hidden_dropout_prob", "dropout_rate", "attention_dropout", "p_drop", "drop"),
    "init_std": ("init_std", "initializer_range", "init_range", "init_scale", "initializer_std"),
    "residual_init": ("scaled_init", "residual_init", "scaled_residual_init", "residual_init_scale",
                      "init_residual_scaled",
                      "depth_scaled_init", "scale_residual_init", "resid_init", "scaled_resid_init",
                      "init_rule", "init"),
    "qk_norm": ("qk_norm", "use_qk_norm", "qk_layernorm", "query_key_norm"),
    "pad": ("pad_token_id", "pad_id", "pad_idx", "padding_idx", "pad", "pad_token"),
    "residual_multiplier": ("residual_multiplier", "residual_scale", "resid_scale", "branch_scale"),
    "parallel": ("parallel", "parallel_attn", "use_parallel_residual", "parallel_residual", "parallel_block",
                 "shared_attention_norm"),
    "capacity": ("capacity", "capacity_factor", "expert_capacity"),
    "causal": ("causal", "is_causal", "is_decoder"),
    "kind": ("kind", "architecture", "arch", "model_kind"),
    "softcap": ("softcap", "attn_logit_softcapping", "logit_softcap", "attn_softcap"),
}  # fmt: skip
"""fact -> spellings, the most likely first."""

WORDS: dict[str, tuple[re.Pattern[str], type | tuple[type, ...]]] = {
    "tied": (
        re.compile(
            r"^(?!.*(layer|_kv|attn|expert|rel|cross)).*(tie|tying|share).*(emb|word|weight|head|out|soft|vocab|io)"
        ),
        bool,
    ),
    "activation": (re.compile(r"(^|_)(act|activation|nonlin|nonlinearity)(_|$)"), str),
    "n_layers": (re.compile(r"^(n|num|dec\w*)_(\w+_)?(layers?|blocks?)$"), int),
    "eps": (re.compile(r"^(?!.*(adam|optim)).*(eps|epsilon)$"), float),
    "placement": (
        re.compile(r"^(\w+_)?(pre|post)_?(ln|norm|layer_?norm)$|(norm\w*|ln)_(before|after|first)$"),
        (bool, str),
    ),
    "position": (re.compile(r"^pos\w*_(type|kind|scheme|style|method|enc\w*|emb\w*)$"), str),
    "rope_base": (re.compile(r"(rope|rotary)\w*_(base|theta)"), (int, float)),
    "max_len": (re.compile(r"^(?!.*(batch|voc|global)).*(max|ctx|context|block)\w*_(len(gth)?|size|positions)$"), int),
    "init_std": (re.compile(r"(^|_)init\w*_(std|sd|stdev|stddev|sigma)$"), float),
    "window": (
        re.compile(r"^(swa|sliding|local|attn|attention)\w*_(window|size|span|width)$|window_(len|length)$"),
        int,
    ),
}
"""fact -> a pattern of the words that other spellings consist of, and the type of the value. Read where NAMES has
nothing."""
PLACED = re.compile(r"^(pre|post)[-_ ]?(norm|ln|layer_?norm)?$")

_MISSING = object()


def flat(config: Any) -> dict[str, Any]:
    """The fields of a config as one dictionary: a mapping, a dataclass, a namespace, or any object with attributes."""
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return dict(config)
    fields = getattr(config, "__dict__", None)
    found = dict(fields) if isinstance(fields, dict) else {}
    if not found:  # a class used as a config, or an instance that sets nothing itself
        found = _class_values(config if isinstance(config, type) else type(config))
    for name in getattr(config, "__slots__", ()):
        found.setdefault(name, getattr(config, name, None))
    for name in getattr(config, "_fields", ()):  # named tuples
        found.setdefault(name, getattr(config, name, None))
    # values that a class holds for all its instances, and spellings that a config translates
    for names in (*NAMES.values(), ("model_type", "is_encoder_decoder", "rope_parameters", "layer_types")):
        for name in names:
            if name not in found:
                value = getattr(config, name, _MISSING)
                if value is not _MISSING and not callable(value):
                    found[name] = value
    return found


def _class_values(cls: type) -> dict[str, Any]:
    """The plain values that a class and its parents define."""
    found: dict[str, Any] = {}
    for parent in reversed(cls.__mro__[:-1]):
        for name, value in vars(parent).items():
            if not name.startswith("_") and not callable(value) and not hasattr(value, "__get__"):
                found[name] = value
    return found


@dataclass(frozen=True)
class Declared:
    """One fact per field, None where the model does not say. `raw` is the config as a dictionary."""

    facts: dict[str, Any] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, "Declared"] = field(default_factory=dict)
    """Configs inside the config, by the name of their field: `decoder`, `text_config`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in NAMES:
            raise AttributeError(name)
        return self.facts.get(name)

    def number(self, name: str) -> float | None:
        """A fact that is a number, else None (a string or an object may stand under the same name)."""
        value = self.facts.get(name)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def whole(self, name: str) -> int | None:
        value = self.number(name)
        return int(value) if value is not None and value == int(value) and value > 0 else None

    def of_stack(self, stack: str) -> "Declared":
        """What is declared for one stack, `encoder` or `decoder`: its own config where there is one."""
        return next((part for name, part in self.parts.items() if name.startswith(stack)), self)

    def every(self, name: str) -> list[Any]:
        """All values that the config gives for one fact, under any of its names; configs may contradict themselves."""
        found = [self.raw[n] for n in NAMES[name] if self.raw.get(n) is not None]
        return found or ([self.facts[name]] if self.facts.get(name) is not None else [])

    @property
    def head_width(self) -> int | None:
        width, d, h = self.whole("d_head"), self.whole("d_model"), self.whole("n_heads")
        return width or (d // h if d and h else None)

    @property
    def position_kind(self) -> str | None:
        """`learned`, `sinusoidal`, `rotary`, `alibi`, `t5`, `query_key` or `none`; None if not declared."""
        return position_kind(self)

    def window_of(self, layer: int) -> int | None:
        """The declared window of one layer: how many keys a query sees, itself among them. None: all of them."""
        raw = self.raw
        if isinstance(raw.get("windows"), list):
            return raw["windows"][layer] if layer < len(raw["windows"]) else None
        if raw.get("use_sliding_window") is False:
            return None
        if self.by_layer(layer):
            kind = str((raw.get("layer_types") or raw["attention_layers"])[layer])
            return self.whole("window") if any(word in kind for word in ("sliding", "local", "window")) else None
        return self.whole("window")

    def by_layer(self, layer: int) -> bool:
        """Whether the config has a list that says what kind of attention a layer has."""
        kinds = self.raw.get("layer_types") or self.raw.get("attention_layers")
        return isinstance(kinds, list | tuple) and layer < len(kinds)

    def attention_scale(self, width: int, layer: int = 0) -> tuple[float, str] | None:
        """The declared factor on q·k for heads of `width`, and where it is declared."""
        return declared_scale(self, width, layer)


def declared(model: Any, extra: Mapping[str, Any] | None = None) -> Declared:
    """Read `model.config` (or `.cfg`, `.args`, `.hparams`); `extra`, what the user expects, goes before it."""
    config: Any = None
    for name in ("config", "cfg", "args", "hparams", "conf"):
        config = getattr(model, name, None)
        if config is not None and not isinstance(config, str | int | float | nn.Module):
            break
        config = None
    ours = _ours(config)
    raw = {**flat(config), **ours}
    given = {name for name, value in raw.items() if value is not None}
    raw |= {name: value for name, value in _attributes(model, config is None).items() if name not in given}
    inner = {} if ours else _inner(raw)
    for name, value in (extra or {}).items():
        raw[name.replace("-", "_")] = value
    facts = _facts(raw)
    for fields in inner.values():
        facts = {**_facts(fields), **facts}
        raw = {**fields, **raw}
    return Declared(facts, raw, {name: Declared(_facts(fields), fields) for name, fields in inner.items()})


SIZES = ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "max_len", "tied", "window")
SPECIAL_ID = re.compile(r"_token_(id|ids|index)$|^(bos|eos|sos|pad|padding|sep|cls|mask|unk)_(id|idx|index)$")
"""Names of ids with a meaning of their own."""


def _attributes(model: Any, sizes: bool) -> dict[str, Any]:
    """What the model itself keeps as plain attributes: special ids, sizes if it has no config, else the padding id.

    An embedding of the vocabulary with a `padding_idx` declares padding too.
    """
    held = vars(model) if isinstance(model, nn.Module) else {}
    plain = {n: v for n, v in held.items() if isinstance(v, int) and not n.startswith("_") and n != "training"}
    names = {name for fact in SIZES for name in NAMES[fact]} if sizes else set[str]()
    found = {n: v for n, v in plain.items() if n in names or (SPECIAL_ID.search(n) and type(v) is int)}
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)] if isinstance(model, nn.Module) else []
    size = max((table.num_embeddings for table in tables), default=0)
    ids = [t.padding_idx for t in tables if t.num_embeddings == size and t.padding_idx is not None]
    if ids and not any(name in found for name in NAMES["pad"]):
        found["padding_idx"] = ids[0]
    return found


def _facts(raw: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for fact, names in NAMES.items():
        value = next((raw[name] for name in names if raw.get(name) is not None), None)
        if value is None and fact in WORDS:
            value = _by_words(fact, raw)
        if value is not None:
            found[fact] = value
    for name, value in raw.items():  # a field for norms in general may say where they are: norm="pre"
        if "norm" in name.lower() and isinstance(value, str) and (where := PLACED.match(value.lower())):
            found.setdefault("placement", where[1])
    return found


def _by_words(fact: str, raw: Mapping[str, Any]) -> Any:
    """The value of the first field whose name consists of the words of this fact."""
    pattern, kind = WORDS[fact]
    for name, value in raw.items():
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int) or not pattern.search(name.lower()):
            continue
        if fact == "placement" and isinstance(value, bool):
            after = "post" in name.lower() or "after" in name.lower()
            return "post" if value == after else "pre"
        return value
    return None


OTHER_INPUTS = ("vision", "audio", "image", "video", "speech", "codec", "quantization", "rope", "generation")
"""Words in the name of a config inside a config that does not describe the text model."""
_SPELLINGS = frozenset(name for names in NAMES.values() for name in names)


def _inner(raw: Mapping[str, Any], depth: int = 2) -> dict[str, dict[str, Any]]:
    """Configs inside a config that describe the text model or a part of it, decoders before encoders."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in raw.items():
        if any(word in str(name).lower() for word in OTHER_INPUTS) or isinstance(value, nn.Module | type):
            continue
        if isinstance(value, Mapping) or (hasattr(value, "__dict__") and not callable(value)):
            fields = flat(value)
            for deeper in _inner(fields, depth - 1).values() if depth > 1 else ():  # an encoder's own text config
                fields = {**deeper, **fields}
            if fields.keys() & _SPELLINGS:
                found[name] = fields
    return dict(sorted(found.items(), key=lambda item: ("dec" not in item[0], "text" not in item[0], item[0])))


def _ours(config: Any) -> dict[str, Any]:
    """Our own config keeps its facts one level down, in parts."""
    if not type(config).__module__.startswith("glassformer.config"):
        return {}
    feedforward = getattr(config.feedforward, "expert", config.feedforward)
    window = None if config.attention.window_layers is not None else config.attention.window
    return {
        "n_heads": config.n_heads,
        "n_kv_heads": config.n_kv_heads,
        "d_head": config.d_head,
        "window": window,
        "windows": [config.window(i) for i in range(config.n_layers)],
        "scale": config.scale,
        "tied": config.head.tied if config.head else None,
        "activation": getattr(feedforward, "activation", None),
        "eps": config.norm.eps,
        "qk_norm": config.attention.qk_norm is not None,
        "pad": config.special.pad,
        "position": config.position.kind,
        "rope_base": getattr(config.position, "base", None) if config.position.kind == "rotary" else None,
        "rope_bases": [_base(config.layer_position(i)) for i in range(config.n_layers)],
        "layers_without_positions": [i for i in range(config.n_layers) if config.layer_position(i).kind == "none"],
        "bias_rounded": getattr(config.position, "rounded", False),
        "rope_pairing": getattr(config.position, "pairing", None),
        "rope_scaling": getattr(config.position, "scaling", None),
        "rope_fraction": getattr(config.position, "fraction", None),
    }


def _base(position: Any) -> float | None:
    """The rotary base of one layer; None without rotation, or where a scaling changes what it means."""
    return position.base if position.kind == "rotary" and position.scaling is None else None


POSITION_WORDS = {
    "rotary": ("rotary", "rope", "roformer"),
    "alibi": ("alibi",),
    "t5": ("t5", "bucket", "relative_bias", "relative_key"),
    "query_key": ("query_key", "infused"),
    "sinusoidal": ("sinus", "sincos", "fixed", "fourier"),
    "learned": ("learn", "absolute", "table", "embedding"),
    "none": ("none", "nope", "no_position", "noposition"),
}


def position_kind(facts: Declared) -> str | None:
    declared = facts.position
    if isinstance(declared, str):
        for kind, words in POSITION_WORDS.items():
            if any(word in declared.lower() for word in words):
                return kind
    raw = facts.raw
    if raw.get("alibi") or raw.get("use_alibi") or raw.get("slopes"):
        return "alibi"
    if raw.get("rope") or raw.get("use_rope") or raw.get("rotary") or raw.get("use_rotary"):
        return "rotary"
    attention = raw.get("attn_config")
    if attention is not None and flat(attention).get("alibi"):
        return "alibi"
    if raw.get("relative_attention_num_buckets"):
        return "t5"
    # a base alone declares rotary positions only if no field for the kind of positions exists, not even an empty one
    unset = any(name in raw and raw[name] is None for name in NAMES["position"])
    if declared is None and not unset and (facts.rope_base or raw.get("rope_parameters") or raw.get("rotary_dim")):
        return "rotary"
    return None


def declared_scale(facts: Declared, width: int, layer: int) -> tuple[float, str] | None:
    raw = facts.raw
    declared = facts.facts.get("scale")
    if isinstance(declared, str):
        words = {"none": 1.0, "mup": 1 / width, "1/d": 1 / width, "sqrt": width**-0.5, "1/sqrt(d)": width**-0.5}
        return (words[declared.lower()], f"config says {declared!r}") if declared.lower() in words else None
    number = facts.number("scale")
    if number is not None:
        return float(number), "the config's own scale"
    if declared is False or raw.get("scale_attn_weights") is False or raw.get("scale_attention") is False:
        return 1.0, "the config says unscaled"
    scalar = raw.get("query_pre_attn_scalar")
    if isinstance(scalar, int | float) and scalar > 0:
        return float(scalar) ** -0.5, "query_pre_attn_scalar of the config"
    if raw.get("mup") or raw.get("use_mup"):
        return 1 / width, "muP: 1/d"
    if raw.get("scale_attn_by_inverse_layer_idx"):
        return width**-0.5 / (layer + 1), "scale_attn_by_inverse_layer_idx of the config"
    terms = raw.get("pos_att_type")
    if raw.get("relative_attention") and terms:  # DeBERTa sums content and position terms of the same size
        count = 1 + sum(term in terms for term in ("c2p", "p2c"))
        return (width * count) ** -0.5, f"1/√({count} d_head): scores are a sum of {count} terms"
    model_type = str(raw.get("model_type", ""))
    if model_type in ("gpt_neo", "t5", "mt5", "umt5", "longt5"):
        return 1.0, "an architecture that folds the scale into its initial weights (T5, GPT-Neo)"
    return None


def yarn_factor(raw: Mapping[str, Any]) -> float:
    """YaRN's factor on q and on k, 0.1 mscale ln(factor) + 1, which some models put into their scale, squared."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling")
    if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type")) != "yarn":
        return 1.0
    mscale, factor = rope.get("mscale_all_dim"), rope.get("factor")
    if not isinstance(mscale, int | float) or not isinstance(factor, int | float) or factor <= 1:
        return 1.0
    return 0.1 * mscale * math.log(factor) + 1


def known_scales(width: int, d_model: int | None, heads: int | None) -> dict[str, float]:
    """Factors with a name, for saying which one was found."""
    found = {"1 (no scaling)": 1.0, "1/d_head": 1 / width, "√d_head": math.sqrt(width), "1/√d_head": width**-0.5}
    if d_model:
        found["1/√d_model"] = d_model**-0.5
    if heads:
        found["1/√n_heads"] = heads**-0.5
    return found
