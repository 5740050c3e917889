"""The one place where evaluation loads a model: for `glass eval`, and for the adapter of lm-evaluation-harness."""

from typing import Any, Literal

from glassformer.model import Model
from glassformer.model.device import choose_device
from glassformer.weights import load_to_compute, load_tokenizer

EvalPrecision = Literal["auto", "float32", "bfloat16", "float16"]
"""Dtypes of the weights in an evaluation; `auto` is float32 on a CPU and the stored dtype on a GPU."""


def open_model(source: str, precision: str = "auto", device: str = "auto") -> tuple[Model, Any]:
    """Return a model on its device in the dtype it is computed in, and its tokenizer (None if it has none)."""
    dtype = None if precision == "auto" else precision
    return load_to_compute(source, dtype=dtype, device=choose_device(device)), load_tokenizer(source)
