"""Rotary positions in the metadata of a GGUF file.

llama.cpp has a base, a linear factor and YaRN in its metadata. The scaling of Llama 3 is stored as a tensor,
`rope_freqs.weight`: the number that divides each frequency.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from glassformer.weights.errors import WeightsError

ORIGINAL = "original_max_position_embeddings"
FREQUENCIES = "rope_freqs.weight"
WINDOW_BASE = "rope.freq_base_swa"
"""The base of layers with a window."""


def write_rope(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of rotary positions from config.json."""
    table = _full(data)
    out: dict[str, Any] = {
        "rope.freq_base": float(table["rope_theta"]),
        "rope.dimension_count": int(_width(data) * table.get("partial_rotary_factor", 1.0)),
    }
    if (sliding := data["rope_parameters"].get("sliding_attention")) is not None:
        _check_unscaled(sliding)
        if table.get("attention_factor") is not None:
            raise WeightsError(
                f"attention_factor={table['attention_factor']!r} of YaRN cannot be written as GGUF for a model with "
                "windows: llama.cpp multiplies the layers with a window by it too."
            )
        out[WINDOW_BASE] = float(sliding["rope_theta"])
    match table["rope_type"]:
        case "default" | "llama3":
            pass
        case "linear":
            out |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(table["factor"])}
        case "yarn":
            out |= _write_yarn(table)
        case kind:
            raise WeightsError(f"rope_type={kind!r} cannot be written as GGUF: use --to hf or --to glass.")
    return out


def _check_unscaled(sliding: Mapping[str, Any]) -> None:
    if sliding["rope_type"] != "default":
        raise WeightsError(
            f"rope_type={sliding['rope_type']!r} of layers with a window cannot be written as GGUF: llama.cpp scales "
            "the frequencies of the other layers only."
        )


def _full(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the table of rotary positions; that of layers without a window, if there are two."""
    table = data.get("rope_parameters", {})
    return table.get("full_attention", table)


def _width(data: Mapping[str, Any]) -> int:
    return int(data.get("head_dim") or data["hidden_size"] // data["num_attention_heads"])


def _write_yarn(table: Mapping[str, Any]) -> dict[str, Any]:
    if table.get("truncate") is False:
        raise WeightsError("truncate=False of YaRN cannot be written as GGUF: llama.cpp rounds the ends of its ramp.")
    out: dict[str, Any] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(table["factor"]),
        "rope.scaling.original_context_length": int(table[ORIGINAL]),
        "rope.scaling.yarn_beta_fast": float(table.get("beta_fast", 32)),
        "rope.scaling.yarn_beta_slow": float(table.get("beta_slow", 1)),
    }
    if table.get("attention_factor") is not None:  # llama.cpp multiplies it by the default of the paper
        out["rope.scaling.attn_factor"] = table["attention_factor"] / default_factor(table["factor"])
    return out


def default_factor(factor: float) -> float:
    """Return the factor of YaRN on sines and cosines if a model does not give another one."""
    return 0.1 * math.log(factor) + 1


def read_rope(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of config.json from metadata without the name of the architecture: `write_rope` backwards."""
    table: dict[str, Any] = {"rope_type": "default", "rope_theta": float(own.get("rope.freq_base", 10000.0))}
    kind, factor = own.get("rope.scaling.type", "none"), own.get("rope.scaling.factor", own.get("rope.scale_linear"))
    if kind == "linear" or (kind == "none" and factor not in (None, 1.0)):
        table |= {"rope_type": "linear", "factor": float(factor or 1.0)}
    elif kind == "yarn":
        table |= {"rope_type": "yarn", "factor": float(own["rope.scaling.factor"])}
        table |= {ORIGINAL: own.get("rope.scaling.original_context_length", own.get("context_length"))}
        table |= {"beta_fast": own.get("rope.scaling.yarn_beta_fast", 32.0)}
        table |= {"beta_slow": own.get("rope.scaling.yarn_beta_slow", 1.0)}
        if "rope.scaling.attn_factor" in own:
            table["attention_factor"] = own["rope.scaling.attn_factor"] * default_factor(table["factor"])
    elif kind != "none":
        raise WeightsError(f"the metadata has rope.scaling.type={kind!r}: only none, linear and yarn are supported.")
    if "rope.dimension_count" in own:
        width = own.get("attention.key_length") or own["embedding_length"] // own["attention.head_count"]
        table["partial_rotary_factor"] = own["rope.dimension_count"] / width
    if WINDOW_BASE in own:
        sliding = {"rope_type": "default", "rope_theta": float(own[WINDOW_BASE])}
        return {"rope_parameters": {"full_attention": table, "sliding_attention": sliding}}
    return {"rope_parameters": table, "rope_theta": table["rope_theta"]}


def write_one_base(data: Mapping[str, Any]) -> dict[str, Any]:
    """Like `write_rope`, where llama.cpp takes the same base for layers with a window and for the others."""
    sliding = data["rope_parameters"].get("sliding_attention")
    if sliding is None:
        return write_rope(data)
    _check_unscaled(sliding)
    full = _full(data) if "full_attention" in data["layer_types"] else sliding
    if sliding["rope_theta"] != full["rope_theta"]:
        raise WeightsError(
            f"rope_theta={sliding['rope_theta']!r} of layers with a window cannot be written as GGUF: llama.cpp "
            f"computes them with {full['rope_theta']!r}, that of the other layers."
        )
    return write_rope({**data, "rope_parameters": full}) | {WINDOW_BASE: float(full["rope_theta"])}


def read_one_base(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of config.json from metadata: `write_one_base` backwards."""
    if own.get("attention.sliding_window"):
        return read_rope({**own, WINDOW_BASE: own.get("rope.freq_base", 10000.0)})
    return read_rope({key: value for key, value in own.items() if key != WINDOW_BASE})


def frequency_factors(data: Mapping[str, Any]) -> Tensor | None:
    """Return the divisors of the frequencies for the scaling of Llama 3; None for other scalings."""
    table = _full(data)
    if table.get("rope_type") != "llama3":
        return None
    rotated = int(_width(data) * table.get("partial_rotary_factor", 1.0))
    return _llama3(table["rope_theta"], rotated, *(table[key] for key in _LLAMA3))


_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL)


def _llama3(base: float, width: int, factor: float, low: float, high: float, original: int) -> Tensor:
    """The divisor is 1 for short wavelengths, `factor` for long ones, and blended between (see `Llama3Scaling`)."""
    frequencies = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    turns = original * frequencies / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / (share + (1 - share) / factor)).float()


def recognize_factors(factors: Tensor, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Llama 3 scaling that gives these divisors, as entries of config.json.

    A file has the divisors only. The parameters are searched among those of published models.
    """
    table = data["rope_parameters"]
    factor = round(float(factors.max()), 4)
    for low, high, original in ((1.0, 4.0, 8192), *((1.0, 4.0, 1 << n) for n in range(4, 18) if n != 13)):
        found = _llama3(table["rope_theta"], 2 * len(factors), factor, low, high, original)
        if torch.allclose(found, factors.float(), rtol=1e-5):
            values = dict(zip(_LLAMA3, (factor, low, high, original), strict=True))
            return {"rope_parameters": table | {"rope_type": "llama3"} | values}
    raise WeightsError(
        f"{FREQUENCIES} has divisors that are not those of Llama 3's scaling with the published parameters: load the "
        "Hugging Face folder of this model instead."
    )
