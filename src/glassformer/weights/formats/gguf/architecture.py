"""What describes an architecture of llama.cpp: `dense.py`, `mixtures.py` and `latent.py` have one description of each.

The metadata go through config.json, so that `families` reads and writes them. Tensors do not: they have the same names
in all architectures of llama.cpp, and so have ours.
"""

import dataclasses
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from glassformer.config import ModelConfig, MoE
from glassformer.weights.convert import CONCATENATED, IDENTITY, Row, Transform, linear
from glassformer.weights.errors import WeightsError
from glassformer.weights.formats.gguf.rope import frequency_factors, read_rope, write_rope
from glassformer.weights.hf.experts import Packed
from glassformer.weights.hf.layouts import OURS, QKV

Metadata = dict[str, Any]
WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
LATER_LAYERS = "nextn_predict_layers"
"""Number of the last layers of a file that predict several tokens at once, and that our models do not have."""
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Key:
    """A number in the metadata (its name follows that of the architecture) and its key in config.json."""

    gguf: str
    hf: str
    kind: type = int
    required: bool = True


class Positions(NamedTuple):
    """How rotary positions are written to the metadata from config.json, and read back."""

    write: Callable[[Mapping[str, Any]], Metadata]
    read: Callable[[Metadata], dict[str, Any]]


ROPE = Positions(write_rope, read_rope)


class Windows(NamedTuple):
    """Sliding windows as llama.cpp computes them: in the layers that config.json lists as `layer_types`."""

    layers: Callable[[int], bool]
    """Returns whether a layer has a window in a file that does not say so."""
    default: int | None = None
    """The window of a file that does not say so. None: such a file has no windows."""
    required: bool = False
    """True if llama.cpp computes no model without windows."""


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


def changed(*left_out: str, of: Mapping[str, str] = NAMES, **others: str) -> dict[str, str]:
    """Return the modules of a block without some, and with others."""
    return {name: ours for name, ours in of.items() if name not in left_out} | others


SHARED_NAMES = {f"ffn_{x}_shexp": f"feedforward.shared.{x}" for x in ("gate", "up", "down")}
"""The modules of a shared expert."""
CORRECTION = Row("blk.{i}.exp_probs_b.bias", (f"{OURS}.feedforward.router.correction",))
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
    """The layout of the weights of norms."""
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys of config.json and the values that llama.cpp assumes: no others can be written. The first one is read."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """Keys of config.json that are true if the file has a tensor of this name."""
    rope: Positions | None = ROPE
    has_divisors: bool = False
    """True if llama.cpp reads the divisors of frequencies, as which the scaling of Llama 3 is stored."""
    windows: Windows | None = None
    """Its sliding windows. None: llama.cpp computes none."""
    assumed: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda data: {}
    """Returns keys of config.json that llama.cpp computes from the rest: no other values can be written."""
    derived: Callable[[Mapping[str, Any]], Metadata] = lambda data: {}
    """Returns metadata of which config.json has no keys.

    Raises:
        WeightsError: llama.cpp computes something else from a key.
    """
    restored: Callable[[Metadata, Container[str]], dict[str, Any]] = lambda own, tensors: {}
    """Returns keys of config.json that no entry above gives, from the metadata and the tensor names of a file."""
    read_type: Callable[[Metadata], str] | None = None
    """Returns the model_type of a file, if it is not the first of `types`."""

    def rows(self, config: ModelConfig) -> tuple[Row, ...]:
        """Return the names of the tensors in llama.cpp, and ours."""
        layouts, E = self.layouts(config), config.feedforward.n_experts if isinstance(config.feedforward, MoE) else 0
        rows = [Row("token_embd.weight", ("embed.tokens.weight",)), *linear("output", "head")]
        rows += [Row("position_embd.weight", ("decoder.position.weight",))]
        rows += linear("token_embd_norm", "decoder.embed_norm")
        rows += linear("output_norm", "decoder.norm")
        rows += linear("blk.{i}.attn_norm", f"{OURS}.norm")  # one norm for two branches
        rows.append(CORRECTION)
        for theirs, ours in self.names.items():
            parts = [f"{OURS}.{part}" for part in ours.split()]
            layout = layouts.get(theirs, CONCATENATED if len(parts) > 1 else IDENTITY)
            rows += linear(f"blk.{{i}}.{theirs}", *parts, transform=layout)
        for x in ("gate", "up", "down"):
            expert = f"{OURS}.feedforward.experts.{{j}}.{x}.weight"
            rows += [Row(f"blk.{{i}}.ffn_{x}_exps.weight", (expert,), Packed(), every=E)] if E else []
        return tuple(
            dataclasses.replace(row, transform=self.norm) if row.theirs.endswith("norm.weight") else row for row in rows
        )

    def metadata(self, data: Mapping[str, Any]) -> Metadata:
        """Return the metadata of a model from its config.json.

        Raises:
            WeightsError: a value differs from what llama.cpp assumes.
        """
        fixed = {**self.fixed, **{key: (value,) for key, value in self.assumed(data).items()}}
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
        out |= self.derived(data)
        if self.windows is not None:
            out |= self._write_windows(self.windows, data)
        if self.rope is not None:
            out |= self.rope.write(data)
            if not self.has_divisors and frequency_factors(data) is not None:
                raise WeightsError(
                    f"rope_type='llama3' cannot be written as GGUF: llama.cpp computes the architecture {self.name} "
                    "without this scaling only; use --to hf or --to glass."
                )
        return {f"{self.name}.{key}": value for key, value in out.items()}

    def _write_windows(self, windows: Windows, data: Mapping[str, Any]) -> Metadata:
        pattern = [kind == SLIDING for kind in data.get("layer_types") or ()]
        if any(pattern):
            return {WINDOW: data["sliding_window"], PATTERN: pattern}
        if windows.required:
            raise WeightsError(
                f"layer_types without {SLIDING!r} cannot be written as GGUF: llama.cpp computes the architecture "
                f"{self.name} with sliding windows only; use --to hf or --to glass."
            )
        return {}

    def config(self, metadata: Metadata, tensors: Container[str]) -> dict[str, Any]:
        """Return config.json from the metadata and the tensor names of a file: the inverse of `metadata`."""
        own = {k.removeprefix(f"{self.name}."): v for k, v in metadata.items() if k.startswith(f"{self.name}.")}
        lacking = [f"{self.name}.{key.gguf}" for key in self.keys if key.required and key.gguf not in own]
        if lacking:
            raise WeightsError(f"the metadata lacks {', '.join(lacking)}, which {self.name} models have.")
        if isinstance(later := own.get(LATER_LAYERS), int) and isinstance(own["block_count"], int):
            own["block_count"] -= later
        data = {key.hf: _value(key, own[key.gguf]) for key in self.keys if key.gguf in own}
        kind = self.read_type(own) if self.read_type is not None else self.types[0]
        data |= {key: tensor in tensors for key, tensor in self.flags.items()} | self.restored(own, tensors)
        data |= {key: allowed[0] for key, allowed in self.fixed.items()}
        data |= self.assumed(data)
        if self.windows is not None:
            data |= _read_windows(self.windows, own, data["num_hidden_layers"])
        return {"model_type": kind, **data, **(self.rope.read(own) if self.rope else {})}


def _read_windows(windows: Windows, own: Metadata, n_layers: int) -> dict[str, Any]:
    width, pattern = own.get(WINDOW, windows.default), own.get(PATTERN)
    if not width:
        return {"layer_types": [FULL] * n_layers}
    if not isinstance(pattern, list):  # absent, or the number of layers after which it repeats
        pattern = [(i + 1) % pattern > 0 if pattern else windows.layers(i) for i in range(n_layers)]
    return {"sliding_window": width, "layer_types": [SLIDING if kind else FULL for kind in pattern]}


def _value(key: Key, value: Any) -> Any:
    """Return a number of the metadata. A list of equal numbers, one for each layer, stands for one number."""
    values = set(value) if isinstance(value, list) else {value}
    if len(values) != 1 or not isinstance(found := values.pop(), int | float):
        raise WeightsError(f"the metadata has {key.gguf}={value!r}: it must be one number for all layers.")
    return key.kind(found)
