"""The architectures of llama.cpp that models are written as and read from: one `Architecture` each.

To add one: list the keys of its metadata with the keys of config.json, the tensors whose names or layouts are not the
usual ones, and the values that llama.cpp assumes without a key. `write.py` and `read.py` use nothing else.

The metadata go through config.json, so that `families` reads and writes them. Tensors do not: they have the same names
in all architectures of llama.cpp, and so have ours.
"""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from glassformer.config import ModelConfig, MoE
from glassformer.weights.convert import CONCATENATED, IDENTITY, Row, Transform, linear
from glassformer.weights.errors import WeightsError
from glassformer.weights.formats.gguf.layouts import PLUS_ONE, Interleaved
from glassformer.weights.formats.gguf.rope import read_rope, write_rope
from glassformer.weights.hf.experts import Packed
from glassformer.weights.hf.layouts import GATE_UP, OURS, QKV

Metadata = dict[str, Any]
WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"


@dataclass(frozen=True)
class Key:
    """A number in the metadata (its name follows that of the architecture) and its key in config.json."""

    gguf: str
    hf: str
    kind: type = int
    required: bool = True


NAMES: dict[str, str] = {
    **{"attn_norm": "norm_attention", "ffn_norm": "norm_feedforward"},
    **{"post_attention_norm": "norm_attention_out", "post_ffw_norm": "norm_feedforward_out"},
    **{f"attn_{x}": f"attention.{x}" for x in "qkv"},
    **{f"attn_{x}_norm": f"attention.{x}_norm" for x in "qk"},
    "attn_output": "attention.o",
    **{f"ffn_{x}": f"feedforward.{x}" for x in ("gate", "up", "down")},
    "ffn_gate_inp": "feedforward.router",
}
"""The modules of a block: their names in llama.cpp, and ours (several if theirs is fused)."""
FUSED_NAMES = {name: ours for name, ours in NAMES.items() if name not in ("attn_q", "attn_k", "attn_v")}
FUSED_NAMES |= {"attn_qkv": QKV}
EXACT = ("position_embd.weight", "ffn_gate_inp.weight", "_norm.weight", "rope_freqs.weight")
"""Ends of the names of tensors that stay in float32 when others are quantised."""


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp."""

    name: str
    """The value of `general.architecture`."""
    types: tuple[str, ...]
    """The values of `model_type` that are written as this architecture. The first one is read from it."""
    keys: tuple[Key, ...]
    names: Mapping[str, str] = field(default_factory=lambda: NAMES)
    layouts: Callable[[ModelConfig], Mapping[str, Transform]] = lambda config: {}
    """Returns the modules of a block whose memory layout is not ours."""
    norm: Transform = IDENTITY
    """The layout of the final norm."""
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys of config.json and the values that llama.cpp assumes: no others can be written. The first one is read."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """Keys of config.json that are true if the file has a tensor of this name."""
    rotary: bool = True
    has_windows: bool = False
    """True if llama.cpp computes sliding windows, in the layers that config.json lists as `layer_types`."""
    windows: Callable[[int], bool] = lambda layer: True
    """Returns whether a layer has a window in a file that does not say so."""
    scalar: Callable[[Mapping[str, Any]], float] | None = None
    """Returns `query_pre_attn_scalar` as llama.cpp assumes it, from the rest of config.json."""
    read_type: Callable[[Metadata], str] | None = None
    """Returns the model_type of a file, if it is not the first of `types`."""

    def rows(self, config: ModelConfig) -> tuple[Row, ...]:
        """Return the names of the tensors in llama.cpp, and ours."""
        layouts, E = self.layouts(config), config.feedforward.n_experts if isinstance(config.feedforward, MoE) else 0
        rows = [Row("token_embd.weight", ("embed.tokens.weight",)), *linear("output", "head")]
        rows += [Row("position_embd.weight", ("decoder.position.weight",))]
        rows += linear("output_norm", "decoder.norm", transform=self.norm)
        rows += linear("blk.{i}.attn_norm", f"{OURS}.norm")  # one norm for two branches
        for theirs, ours in self.names.items():
            parts = [f"{OURS}.{part}" for part in ours.split()]
            layout = layouts.get(theirs, CONCATENATED if len(parts) > 1 else IDENTITY)
            rows += linear(f"blk.{{i}}.{theirs}", *parts, transform=layout)
        for x in ("gate", "up", "down"):
            expert = f"{OURS}.feedforward.experts.{{j}}.{x}.weight"
            rows += [Row(f"blk.{{i}}.ffn_{x}_exps.weight", (expert,), Packed(), every=E)] if E else []
        return tuple(rows)

    def metadata(self, data: Mapping[str, Any]) -> Metadata:
        """Return the metadata of a model from its config.json.

        Raises:
            WeightsError: a value differs from what llama.cpp assumes.
        """
        fixed = {**self.fixed, **({} if self.scalar is None else {"query_pre_attn_scalar": (self.scalar(data),)})}
        for key, allowed in fixed.items():
            if data.get(key) not in (*allowed, None):
                raise WeightsError(
                    f"{key}={data[key]!r} cannot be written as GGUF: llama.cpp computes the architecture {self.name} "
                    f"with {allowed[0]!r} only; use --to hf or --to glass."
                )
        if lacking := [key.hf for key in self.keys if key.required and data.get(key.hf) is None]:
            raise WeightsError(
                f"{lacking[0]}=None cannot be written as GGUF: llama.cpp computes the architecture {self.name} with a "
                "number only; use --to hf or --to glass."
            )
        out: Metadata = {key.gguf: key.kind(data[key.hf]) for key in self.keys if data.get(key.hf) is not None}
        if self.has_windows and data.get("sliding_window") is not None:
            out[WINDOW] = data["sliding_window"]
            out[PATTERN] = [kind == "sliding_attention" for kind in data["layer_types"]]
        if self.rotary:
            out |= write_rope(data)
        return {f"{self.name}.{key}": value for key, value in out.items()}

    def config(self, metadata: Metadata, tensors: Container[str]) -> dict[str, Any]:
        """Return config.json from the metadata and the tensor names of a file: the inverse of `metadata`."""
        own = {k.removeprefix(f"{self.name}."): v for k, v in metadata.items() if k.startswith(f"{self.name}.")}
        lacking = [f"{self.name}.{key.gguf}" for key in self.keys if key.required and key.gguf not in own]
        if lacking:
            raise WeightsError(f"the metadata lacks {', '.join(lacking)}, which {self.name} models have.")
        data = {key.hf: _value(key, own[key.gguf]) for key in self.keys if key.gguf in own}
        kind = self.read_type(own) if self.read_type is not None else self.types[0]
        data |= {key: tensor in tensors for key, tensor in self.flags.items()}
        data |= {key: allowed[0] for key, allowed in self.fixed.items()}
        if self.scalar is not None:
            data["query_pre_attn_scalar"] = self.scalar(data)
        if self.has_windows:
            data |= self._read_windows(own, data["num_hidden_layers"])
        return {"model_type": kind, **data, **(read_rope(own) if self.rotary else {})}

    def _read_windows(self, own: Metadata, n_layers: int) -> dict[str, Any]:
        pattern = own.get(PATTERN)
        if not isinstance(pattern, list):  # absent, or the number of layers after which it repeats
            pattern = [(i + 1) % pattern > 0 if pattern else self.windows(i) for i in range(n_layers)]
        names = ("full_attention", "sliding_attention")
        return {"sliding_window": own.get(WINDOW), "layer_types": [names[bool(kind)] for kind in pattern]}


def _value(key: Key, value: Any) -> Any:
    """Return a number of the metadata. A list of equal numbers, one for each layer, stands for one number."""
    values = set(value) if isinstance(value, list) else {value}
    if len(values) != 1 or not isinstance(found := values.pop(), int | float):
        raise WeightsError(f"the metadata has {key.gguf}={value!r}: it must be one number for all layers.")
    return key.kind(found)


def find(name: object) -> Architecture:
    """Return an architecture by the value of `general.architecture`."""
    for architecture in ARCHITECTURES:
        if architecture.name == name:
            return architecture
    known = ", ".join(architecture.name for architecture in ARCHITECTURES)
    raise WeightsError(f"general.architecture={name!r} is not known: known are {known}.")


def for_type(model_type: str) -> Architecture:
    """Return the architecture as which a Hugging Face model type is written."""
    for architecture in ARCHITECTURES:
        if model_type in architecture.types:
            return architecture
    known = ", ".join(kind for architecture in ARCHITECTURES for kind in architecture.types)
    raise WeightsError(f"a {model_type} model cannot be written as GGUF: known types are {known}; use --to hf.")


GPT2 = Architecture(
    name="gpt2",
    types=("gpt2",),
    keys=(
        Key("context_length", "n_positions"),
        Key("embedding_length", "n_embd"),
        Key("block_count", "n_layer"),
        Key("feed_forward_length", "n_inner"),
        Key("attention.head_count", "n_head"),
        Key("attention.layer_norm_epsilon", "layer_norm_epsilon", float),
    ),
    names=FUSED_NAMES,
    fixed={"activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,)},
    rotary=False,
)

LLAMA_KEYS = (
    Key("context_length", "max_position_embeddings"),
    Key("embedding_length", "hidden_size"),
    Key("block_count", "num_hidden_layers"),
    Key("feed_forward_length", "intermediate_size"),
    Key("attention.head_count", "num_attention_heads"),
    Key("attention.head_count_kv", "num_key_value_heads", required=False),
    Key("attention.key_length", "head_dim", required=False),
    Key("attention.value_length", "head_dim", required=False),
    Key("attention.layer_norm_rms_epsilon", "rms_norm_eps", float),
    Key("expert_count", "num_local_experts", required=False),
    Key("expert_used_count", "num_experts_per_tok", required=False),
)
SILU = {"hidden_act": ("silu", "swish")}

LLAMA = Architecture(
    name="llama",
    types=("llama", "mistral", "mixtral"),
    keys=LLAMA_KEYS,
    layouts=lambda config: {"attn_q": Interleaved(config.n_heads), "attn_k": Interleaved(config.n_kv_heads)},
    fixed=SILU,
    flags={"attention_bias": "blk.0.attn_output.bias", "mlp_bias": "blk.0.ffn_down.bias"},
    read_type=lambda own: "mixtral" if own.get("expert_count") else "llama",
)

QWEN2 = Architecture(name="qwen2", types=("qwen2",), keys=LLAMA_KEYS[:-2], fixed=SILU)

QWEN3 = Architecture(
    name="qwen3",
    types=("qwen3",),
    keys=LLAMA_KEYS[:-2],
    fixed={**SILU, "attention_bias": (False,)},
)

QWEN3_MOE = Architecture(
    name="qwen3moe",
    types=("qwen3_moe",),
    keys=(
        *LLAMA_KEYS[:-2],
        Key("expert_count", "num_experts"),
        Key("expert_used_count", "num_experts_per_tok"),
        Key("expert_feed_forward_length", "moe_intermediate_size"),
    ),
    fixed={
        **SILU,
        "attention_bias": (False,),
        "norm_topk_prob": (True,),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([],),
    },
)

OLMO2 = Architecture(
    name="olmo2",
    types=("olmo2",),
    keys=LLAMA_KEYS[:-2],
    names={name: ours for name, ours in NAMES.items() if not name.endswith("_norm") or name[:6] in ("attn_q", "attn_k")}
    | {"post_attention_norm": "norm_attention", "post_ffw_norm": "norm_feedforward"},
    fixed={**SILU, "attention_bias": (False,)},
)

GEMMA_NORMS: dict[str, Any] = {
    "layouts": lambda config: {name: PLUS_ONE for name in NAMES if name.endswith("norm")},
    "norm": PLUS_ONE,
}
TANH_GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu")  # transformers computes all of them alike in Gemma
GEMMA_FIXED = {"tie_word_embeddings": (True,), "attention_bias": (False,)}

GEMMA = Architecture(
    name="gemma",
    types=("gemma",),
    keys=LLAMA_KEYS[:-2],
    fixed={**GEMMA_FIXED, "hidden_act": TANH_GELU},
    **GEMMA_NORMS,
)


def _gemma_scalar(largest: int) -> Callable[[Mapping[str, Any]], float]:
    """Return the rule of llama.cpp: the head width, but D/H in the largest model, known by its number of layers."""

    def scalar(data: Mapping[str, Any]) -> float:
        by_heads = data["hidden_size"] // data["num_attention_heads"]
        return by_heads if data["num_hidden_layers"] == largest else data.get("head_dim") or by_heads

    return scalar


GEMMA2 = Architecture(
    name="gemma2",
    types=("gemma2",),
    keys=(
        *LLAMA_KEYS[:-2],
        Key("attn_logit_softcapping", "attn_logit_softcapping", float),
        Key("final_logit_softcapping", "final_logit_softcapping", float),
    ),
    fixed={**GEMMA_FIXED, "hidden_activation": TANH_GELU},
    has_windows=True,
    windows=lambda layer: layer % 2 == 0,
    scalar=_gemma_scalar(largest=46),
    **GEMMA_NORMS,
)

GEMMA3 = Architecture(
    name="gemma3",
    types=("gemma3_text",),
    keys=(*LLAMA_KEYS[:-2], Key("final_logit_softcapping", "final_logit_softcapping", float, required=False)),
    fixed={**GEMMA_FIXED, "hidden_activation": TANH_GELU},
    has_windows=True,
    windows=lambda layer: layer % 6 < 5,
    scalar=_gemma_scalar(largest=62),
    **GEMMA_NORMS,
)

PHI3 = Architecture(
    name="phi3",
    types=("phi3",),
    keys=LLAMA_KEYS[:-2],
    names={name: ours for name, ours in FUSED_NAMES.items() if name != "ffn_gate"} | {"ffn_up": GATE_UP},
    fixed=SILU,
)

STABLELM = Architecture(
    name="stablelm",
    types=("stablelm",),
    keys=(
        *(key for key in LLAMA_KEYS[:-2] if key.hf != "rms_norm_eps"),
        Key("attention.layer_norm_epsilon", "layer_norm_eps", float),
        Key("use_parallel_residual", "use_parallel_residual", bool),
    ),
    fixed={**SILU, "tie_word_embeddings": (False,)},
    flags={"use_qkv_bias": "blk.0.attn_q.bias", "qk_layernorm": "blk.0.attn_q_norm.weight"},
)

ARCHITECTURES = (GPT2, LLAMA, QWEN2, QWEN3, QWEN3_MOE, OLMO2, GEMMA, GEMMA2, GEMMA3, PHI3, STABLELM)
"""Every architecture. Those of families that are not read yet are used when they are."""
