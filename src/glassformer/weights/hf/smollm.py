"""SmolLM3: Llama in which every fourth layer does not rotate queries and keys."""

from typing import Any

from glassformer.weights.errors import WeightsError
from glassformer.weights.family import Source
from glassformer.weights.hf.common import ATTENTION_BIAS, GATED, MLP_BIAS, RMS, TIED, classes, eps, rope, sizes
from glassformer.weights.hf.layers import RotatedLayers, Windows, all_full
from glassformer.weights.hf.layouts import LLAMA, names
from glassformer.weights.keys import Values, describe


def rotated(source: Source, values: Values) -> list[bool]:
    n, step = values["n_layers"], source.integer("no_rope_layer_interval", 4)
    given = source.data.get("no_rope_layers")
    if given is None:
        given = [int((i + 1) % step != 0) for i in range(n)]
    if not isinstance(given, list) or len(given) != n or any(flag not in (0, 1) for flag in given):
        raise WeightsError(
            f"config.json has no_rope_layers={given!r}, which must be 1 (rotate) or 0 for each of the {n} layers."
        )
    return [bool(flag) for flag in given]


def written(layers: list[bool]) -> dict[str, Any]:
    return {"no_rope_layers": [int(rotates) for rotates in layers]}


SMOLLM3 = describe(
    "smollm3",
    classes("SmolLM3"),
    {**RMS, **GATED},
    (
        *(*sizes(32768, n_kv_heads=4), ATTENTION_BIAS, MLP_BIAS, eps(1e-6), TIED, rope(2e6)),
        Windows(None, all_full, switch="use_sliding_window"),
        RotatedLayers(rotated, written),
    ),
    names(LLAMA),
)
FAMILIES = (SMOLLM3,)
