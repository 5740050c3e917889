"""Rotary positions in `config.json`, in both formats: `rope_theta` and `rope_scaling` (before transformers 5), and
`rope_parameters` (since transformers 5).

Every entry is used or rejected. NTK scaling is equivalent to a larger base and is written as one. `dynamic` is not
supported: its frequencies change with every new token, also for the keys that are already cached.
"""

import math
from typing import Any

from glassformer.config import (
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    NTKScaling,
    Rotary,
    RotaryScaling,
    YarnScaling,
)
from glassformer.config.position import WaveLayout
from glassformer.weights.errors import WeightsError, summarize
from glassformer.weights.family import Source

ORIGINAL = "original_max_position_embeddings"
SCALED = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", ORIGINAL},
    "yarn": {
        *("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", ORIGINAL),
        "finetuned",  # informative only: no implementation reads it
    },
    "longrope": {"factor", "attention_factor", "short_factor", "long_factor", ORIGINAL},
}
OLD_NAMES = {"su": "longrope"}
COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def read_rope(
    source: Source,
    max_len: int | None,
    default_theta: float = 10000.0,
    pairing: WaveLayout = "halves",
    fraction: float | None = None,
) -> Rotary:
    """Return the rotary positions that config.json describes.

    `fraction` is the default of `partial_rotary_factor`; None: the family rotates whole heads.
    """
    table = source.data.get("rope_scaling") or source.data.get("rope_parameters") or {}
    return rope_of(table, source, max_len, default_theta, pairing, fraction)


def rope_of(
    table: Any,
    source: Source,
    max_len: int | None,
    default_theta: float,
    pairing: WaveLayout = "halves",
    fraction: float | None = None,
) -> Rotary:
    """Return the rotary positions of one table, and of the keys next to it in config.json."""
    if not isinstance(table, dict) or any(isinstance(value, dict) for value in table.values()):
        raise WeightsError(f"config.json has rope_parameters={table!r}: give one flat table for all layers.")
    given = {key: value for key, value in table.items() if value is not None}
    kind = given.get("rope_type", given.get("type", "default"))
    kind = OLD_NAMES.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in SCALED:
        raise WeightsError(
            f"config.json has rope_type={kind!r}, whose frequencies are not implemented (those of dynamic change with "
            f"every new token): only {', '.join(SCALED)} can be loaded."
        )
    unknown = sorted(given.keys() - SCALED[kind] - COMMON)
    if unknown:
        raise WeightsError(
            f"config.json's rotary table of type {kind!r} has keys that are not known ({summarize(unknown)})."
        )
    rotated = given.get("partial_rotary_factor", source.number("partial_rotary_factor", fraction or 1.0))
    if fraction is None and rotated != 1:
        raise WeightsError(f"config.json has partial_rotary_factor={rotated}: this family rotates whole heads, use 1.")
    lists = ("short_factor", "long_factor") if kind == "longrope" else ()
    wrong = [
        f"{k}={v!r}"
        for k, v in given.items()
        if not isinstance(v, int | float) and k not in ("rope_type", "type", *lists)
    ]
    if wrong:
        raise WeightsError(f"config.json's rotary table holds values that are not numbers ({summarize(wrong)}).")
    base = float(given.get("rope_theta", source.number("rope_theta", default_theta)))
    scaling = _read_scaling(kind, given, source, max_len)
    return Rotary(base=base, pairing=pairing, fraction=float(rotated), scaling=scaling)


def _read_scaling(kind: str, given: dict[str, Any], source: Source, max_len: int | None) -> RotaryScaling | None:
    if kind == "default":
        return None
    original = source.integer(ORIGINAL, given.get(ORIGINAL, max_len))
    if kind == "longrope":
        return _read_long(given, original, max_len)
    factor = given.get("factor")
    if factor is None and kind == "yarn" and max_len is not None:
        factor = max_len / original
    if factor is None:
        raise WeightsError(f"config.json's rotary table of type {kind!r} lacks 'factor': add it.")
    if kind == "linear":
        return LinearScaling(float(factor))
    if kind == "llama3":
        lacking = [key for key in ("low_freq_factor", "high_freq_factor") if key not in given]
        if lacking:
            raise WeightsError(f"config.json's rotary table of type 'llama3' lacks {summarize(lacking)}: add them.")
        return Llama3Scaling(
            float(factor), int(original), float(given["low_freq_factor"]), float(given["high_freq_factor"])
        )
    return YarnScaling(
        factor=float(factor),
        original_max_len=int(original),
        beta_fast=float(given.get("beta_fast") or 32),
        beta_slow=float(given.get("beta_slow") or 1),
        attention_factor=_attention_factor(float(factor), given),
        truncate=bool(given.get("truncate", True)),
    )


def _read_long(given: dict[str, Any], original: int | None, max_len: int | None) -> LongScaling:
    """Return the two lists of divisors, and the factor on cos and sin: sqrt(1 + ln F / ln M) for a context F M."""
    divisors = list[tuple[float, ...]]()
    for key in ("short_factor", "long_factor"):
        found = given.get(key)
        if not isinstance(found, list) or not all(type(value) in (int, float) for value in found):
            raise WeightsError(f"config.json's rotary table of type 'longrope' needs a list of numbers in {key!r}.")
        divisors.append(tuple(map(float, found)))
    if original is None:
        raise WeightsError(f"config.json's rotary table of type 'longrope' lacks {ORIGINAL!r}: add it.")
    factor = float(given.get("factor") or (max_len or original) / original)
    growth = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    short, long = divisors
    return LongScaling(short, long, int(original), float(given.get("attention_factor") or growth))


def _attention_factor(factor: float, given: dict[str, Any]) -> float | None:
    """Return the factor on cos and sin: `attention_factor`, or the ratio defined by DeepSeek's two `mscale` values."""

    def growth(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if "attention_factor" in given:
        return float(given["attention_factor"])
    if given.get("mscale") and given.get("mscale_all_dim"):
        return growth(given["mscale"]) / growth(given["mscale_all_dim"])
    return None


def fold_ntk(rotary: Rotary, d_head: int) -> Rotary:
    """Return the same frequencies without NTK scaling, by the larger base: base * factor^(R/(R-2))."""
    if not isinstance(rotary.scaling, NTKScaling):
        return rotary
    R = rotary.rotated(d_head)
    base = rotary.base * rotary.scaling.factor ** (R / (R - 2))
    return Rotary(base=base, pairing=rotary.pairing, fraction=rotary.fraction)


def write_rope(rotary: Rotary, d_head: int, with_fraction: bool = False) -> dict[str, Any]:
    """Return `rope_parameters`, and also the older keys for readers that know only those.

    `with_fraction` is True for families that can rotate a part of each head.
    """
    table = rope_table(rotary, d_head)
    partial = {"partial_rotary_factor": rotary.fraction} if with_fraction else {}
    table |= partial
    old = {key: value for key, value in table.items() if key != "rope_theta"}
    # transformers reads the length at which LongRoPE changes its frequencies from the top level
    original = {ORIGINAL: table[ORIGINAL]} if table["rope_type"] == "longrope" else {}
    return {
        **original,
        "rope_parameters": table,
        "rope_theta": table["rope_theta"],
        "rope_scaling": None if table["rope_type"] == "default" else old,
        **partial,
    }


def rope_table(rotary: Rotary, d_head: int) -> dict[str, Any]:
    """Return one table of `rope_parameters`."""
    rotary = fold_ntk(rotary, d_head)
    table: dict[str, Any] = {"rope_type": "default", "rope_theta": rotary.base}
    match rotary.scaling:
        case LinearScaling(factor):
            table |= {"rope_type": "linear", "factor": factor}
        case Llama3Scaling() as s:
            table |= {"rope_type": "llama3", "factor": s.factor, ORIGINAL: s.original_max_len}
            table |= {"low_freq_factor": s.low_freq_factor, "high_freq_factor": s.high_freq_factor}
        case YarnScaling() as s:
            table |= {"rope_type": "yarn", "factor": s.factor, ORIGINAL: s.original_max_len}
            table |= {"beta_fast": s.beta_fast, "beta_slow": s.beta_slow, "truncate": s.truncate}
            table |= {} if s.attention_factor is None else {"attention_factor": s.attention_factor}
        case LongScaling() as s:
            table |= {"rope_type": "longrope", ORIGINAL: s.original_max_len, "attention_factor": s.attention_factor}
            table |= {"short_factor": list(s.short), "long_factor": list(s.long)}
        case NTKScaling() | None:
            pass
    return table
