"""Llama and related models: pre-norm decoder, RMSNorm, rotary positions, gated feed-forward, grouped-query attention.

| member  | detected by                                    | biases           | window                                 |
|---------|------------------------------------------------|------------------|----------------------------------------|
| Llama   | none of the following                          | all four or none | none                                   |
| Mistral | `sliding_window` without `use_sliding_window`  | none             | all layers                             |
| Mixtral | experts                                        | none             | all layers                             |
| Qwen2   | biases on q, k, v but not on o                 | q, k, v          | some layers, with `use_sliding_window` |
| Qwen3   | norms of queries and keys                      | all four or none | some layers, with `use_sliding_window` |

If config.json has a `model_type`, it must agree with the detected member.
"""

from typing import Any

from glassformer.config import (
    Attention,
    DecoderConfig,
    Dense,
    Gated,
    Head,
    ModelConfig,
    MoE,
    RMSNorm,
    Rotary,
)
from glassformer.weights.convert import Drop, Row, linear
from glassformer.weights.errors import SAVE_AS_GLASS, WeightsError
from glassformer.weights.family import Family, Source, write_activation, write_special
from glassformer.weights.rope import read_rope, write_rope

BLOCK, HF_BLOCK = "decoder.blocks.{i}", "{p}layers.{i}"
EXPERT, HF_EXPERT = BLOCK + ".feedforward.experts.{j}", HF_BLOCK + ".block_sparse_moe.experts.{j}"

ROWS = (
    Row("{p}embed_tokens.weight", ("embed.tokens.weight",)),
    *linear(f"{HF_BLOCK}.input_layernorm", f"{BLOCK}.norm_attention"),
    *(row for x in "qkvo" for row in linear(f"{HF_BLOCK}.self_attn.{x}_proj", f"{BLOCK}.attention.{x}")),
    *(row for x in "qk" for row in linear(f"{HF_BLOCK}.self_attn.{x}_norm", f"{BLOCK}.attention.{x}_norm")),
    *linear(f"{HF_BLOCK}.post_attention_layernorm", f"{BLOCK}.norm_feedforward"),
    *(row for x in ("gate", "up", "down") for row in linear(f"{HF_BLOCK}.mlp.{x}_proj", f"{BLOCK}.feedforward.{x}")),
    Row(f"{HF_BLOCK}.block_sparse_moe.gate.weight", (f"{BLOCK}.feedforward.router.weight",)),
    Row(f"{HF_EXPERT}.w1.weight", (f"{EXPERT}.gate.weight",)),
    Row(f"{HF_EXPERT}.w3.weight", (f"{EXPERT}.up.weight",)),
    Row(f"{HF_EXPERT}.w2.weight", (f"{EXPERT}.down.weight",)),
    Row("{p}norm.weight", ("decoder.norm.weight",)),
    Row("lm_head.weight", ("head.weight",), tied_to="{p}embed_tokens.weight"),
)

DROPS = (
    Drop("{p}layers.{i}.self_attn.rotary_emb.inv_freq", "frequencies, stored by old versions"),
    Drop("{p}rotary_emb.inv_freq", "frequencies, stored by old versions"),
)

# Defaults of transformers for keys that are missing in config.json, where the members differ.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {
        **{"max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    },
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {
        **{"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
        **{"head_dim": 128},
    },
}


def member(source: Source, prefix: str) -> str:
    """Return the member of the family, detected from tensors and keys; without tensors `model_type` decides."""
    given = source.data.get("model_type")
    attention = f"{prefix}layers.0.self_attn."
    window = source.data.get("sliding_window") is not None and "use_sliding_window" not in source.data
    if source.tensors is None and given is not None:
        return given
    if source.has(attention + "q_norm.weight"):
        detected = {"qwen3"}
    elif source.has(attention + "q_proj.bias"):
        detected = {"llama"} if source.has(attention + "o_proj.bias") else {"qwen2"}
    elif "num_local_experts" in source.data:
        detected = {"mixtral"}
    else:  # Llama and Mistral without a window are identical
        detected = {"mistral"} if window else {"llama", "mistral"}
    if given is None:
        return min(detected)
    if given not in detected:
        raise WeightsError(
            f"config.json has model_type={given!r}, but its keys and tensors are those of "
            f"{' or '.join(sorted(detected))}: correct whichever is wrong."
        )
    return given


def read(source: Source) -> ModelConfig:
    prefix = source.prefix("model.")
    kind = member(source, prefix)
    ours = DEFAULTS[kind]
    source.only("pretraining_tp", 1, why="which splits matrices to imitate another machine")
    if kind == "llama":
        source.only("sliding_window", None, why="which Llama does not have")
    else:
        source.only("mlp_bias", False, why=f"which {kind} does not have")
    if kind in ("mistral", "mixtral"):
        source.only("attention_bias", False, why=f"which {kind} does not have")
    d_model, vocab_size = source.integer("hidden_size"), source.integer("vocab_size")
    n_layers, max_len = (
        source.integer("num_hidden_layers"),
        source.integer("max_position_embeddings", ours["max_position_embeddings"]),
    )
    eps = source.number("rms_norm_eps", ours.get("rms_norm_eps", 1e-6))
    expert = Gated(
        source.integer("intermediate_size"),
        activation=source.activation("hidden_act", "silu"),
        bias=source.flag("mlp_bias", False) if kind == "llama" else False,
    )
    tie = source.flag("tie_word_embeddings", False)
    if source.number("attention_dropout", 0.0):
        source.notes.append("attention_dropout is ignored: it only affects training, and only the attention pattern.")
    return DecoderConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        n_layers=n_layers,
        attention=_read_attention(source, kind, d_model, n_layers, eps),
        feedforward=_read_experts(source, expert) if kind == "mixtral" else expert,
        norm=RMSNorm(eps=eps),
        position=read_rope(source, max_len, ours.get("rope_theta", 10000.0)),
        max_len=max_len,
        head=source.head(prefix, "lm_head.weight", f"{prefix}embed_tokens.weight", tie),
        init_std=source.number("initializer_range", 0.02),
        special=source.special(vocab_size),
    )


def _read_experts(source: Source, expert: Gated) -> MoE:
    return MoE(source.integer("num_local_experts", 8), source.integer("num_experts_per_tok", 2), expert)


def _integer_or_default(source: Source, kind: str, key: str) -> Any:
    """Return the value of the key; if it is absent, the default of the member; if it is null, None."""
    return source.integer(key, None if key in source.data else DEFAULTS[kind].get(key))


def _read_attention(source: Source, kind: str, d_model: int, n_layers: int, eps: float) -> Attention:
    n_heads = source.integer("num_attention_heads")
    n_kv_heads = _integer_or_default(source, kind, "num_key_value_heads")
    d_head = _integer_or_default(source, kind, "head_dim")
    bias = kind == "qwen2" or (kind in ("llama", "qwen3") and source.flag("attention_bias", False))
    window, layers = _read_window(source, kind, n_layers)
    return Attention(
        n_heads=n_heads,
        n_kv_heads=None if n_kv_heads == n_heads else n_kv_heads,
        d_head=None if d_head is not None and d_head * n_heads == d_model else d_head,
        bias=bias,
        out_bias=False if kind == "qwen2" else None,
        qk_norm=RMSNorm(eps=eps) if kind == "qwen3" else None,
        window=window,
        window_layers=layers,
    )


def _read_window(source: Source, kind: str, n_layers: int) -> tuple[int | None, tuple[int, ...] | None]:
    """Return the window W and the layers that use it (None: all layers)."""
    width = _integer_or_default(source, kind, "sliding_window")
    listed = source.data.get("layer_types") or []
    if not isinstance(listed, list):
        raise WeightsError(f"config.json has layer_types={listed!r}, which must be a list with a name for each layer.")
    if kind in ("mistral", "mixtral"):
        source.only("layer_types", None, ["sliding_attention"] * n_layers, why="windows in some layers only")
        return width, None
    if kind == "llama" or not source.flag("use_sliding_window", False) or width is None:
        if "sliding_attention" in listed:
            raise WeightsError(
                "config.json has layers of type 'sliding_attention' but no window: set sliding_window and "
                "use_sliding_window."
            )
        return None, None
    first = source.integer("max_window_layers", 28)
    names = ("full_attention", "sliding_attention")
    types = listed or [names[i >= first] for i in range(n_layers)]
    if len(types) != n_layers or any(t not in names for t in types):
        raise WeightsError(
            f"config.json has layer_types={types!r}, which must name 'full_attention' or 'sliding_attention' for each "
            f"of the {n_layers} layers."
        )
    layers = tuple(i for i, t in enumerate(types) if t == "sliding_attention")
    if not layers:
        return None, None
    return width, None if len(layers) == n_layers else layers


def write(config: ModelConfig) -> dict[str, Any]:
    kind = _member_to_write(config)
    assert isinstance(config.position, Rotary)
    expert = config.feedforward.expert if isinstance(config.feedforward, MoE) else config.feedforward
    assert isinstance(expert, Dense | Gated)  # `choose` rejects a model without one
    data: dict[str, Any] = {
        "architectures": [_CLASSES[kind] + ("ForCausalLM" if config.head else "Model")],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.d_head,
        "hidden_act": write_activation(expert.activation),
        "max_position_embeddings": config.max_len or DEFAULTS[kind]["max_position_embeddings"],
        "initializer_range": config.init_std,
        "rms_norm_eps": config.norm.eps,
        "attention_dropout": 0.0,
        "tie_word_embeddings": (config.head or Head(tied=False)).tied,
        **write_rope(config.position, config.d_head),
        **write_special(config.special),
    }
    if kind in ("llama", "qwen3"):
        data["attention_bias"] = config.attention.bias
    if kind == "llama":
        data["mlp_bias"] = expert.bias
    if kind in ("mistral", "mixtral"):
        data["sliding_window"] = config.attention.window
    if kind in ("qwen2", "qwen3"):
        windows = [config.window(i) for i in range(config.n_layers)]
        data["use_sliding_window"] = any(windows)
        data["sliding_window"] = config.attention.window
        data["max_window_layers"] = next((i for i, w in enumerate(windows) if w), config.n_layers)
        data["layer_types"] = ["sliding_attention" if w else "full_attention" for w in windows]
    if isinstance(config.feedforward, MoE):
        data |= {"num_local_experts": config.feedforward.n_experts, "num_experts_per_tok": config.feedforward.n_active}
    return data


_CLASSES = {"llama": "Llama", "mistral": "Mistral", "mixtral": "Mixtral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def _member_to_write(config: ModelConfig) -> str:
    """Return the simplest member that can represent the config. `to_hf` finds what it cannot represent."""
    if isinstance(config.feedforward, Dense):
        raise WeightsError(
            f"feedforward=Dense cannot be written as Llama, whose feed-forwards are gated: {SAVE_AS_GLASS}."
        )
    if config.attention.qk_norm is not None:
        return "qwen3"
    if isinstance(config.feedforward, MoE):
        return "mixtral"
    if config.attention.bias:
        return "llama" if config.out_bias else "qwen2"
    # Llama requires D to be a multiple of H, Mistral does not.
    return "llama" if config.attention.window is None and config.d_model % config.n_heads == 0 else "mistral"


LLAMA = Family(
    name="Llama",
    types=tuple(DEFAULTS),
    keys=("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "rms_norm_eps"),
    typical_names=("embed_tokens.weight", "norm.weight", "layers.0.input_layernorm.weight"),
    prefix="model.",
    embed="embed_tokens.weight",
    rows=lambda config: ROWS,
    drops=DROPS,
    read=read,
    write=write,
)
