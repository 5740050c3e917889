"""How well a model predicts: cross-entropy of texts, paired comparison of two models, multiple choice.

`evaluate` is the public function. Names are imported when first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Difference": "difference",
    "Evaluation": "cross_entropy",
    "evaluate": "cross_entropy",
    "open_model": "load",
    "paired_difference": "difference",
}

__all__ = ["Difference", "Evaluation", "evaluate", "open_model", "paired_difference"]

if TYPE_CHECKING:
    from glassformer.evaluation.cross_entropy import Evaluation, evaluate
    from glassformer.evaluation.difference import Difference, paired_difference
    from glassformer.evaluation.load import open_model


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
