"""The one place where evaluation loads a model: for `glass eval`, and for the adapter of lm-evaluation-harness."""

from typing import Any

from glassformer.generation.request import tokenizer_of
from glassformer.model import Model
from glassformer.model.device import choose_device
from glassformer.weights import load_to_compute


def open_model(
    source: str, precision: str = "auto", device: str = "auto", adapter: str | None = None
) -> tuple[Model, Any]:
    """Return a model on its device in the dtype it is computed in, and its tokenizer (None if it has none).

    `precision` is the dtype of the weights; `auto` is float32 on a CPU and the stored dtype on a GPU.
    `adapter` is the folder of an adapter that is merged into the model. Its own tokenizer is used if it has one.
    """
    dtype = None if precision == "auto" else precision
    model = load_to_compute(source, adapter=adapter, dtype=dtype, device=choose_device(device))
    return model, tokenizer_of(model)
