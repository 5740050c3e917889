"""How well a model predicts: cross-entropy of texts, paired comparison of two models, multiple choice.

`evaluate` is the public function. Names are imported when first used.
"""

from typing import TYPE_CHECKING

from glassformer import imported_when_used

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

__getattr__ = imported_when_used(__name__, _HOMES)
