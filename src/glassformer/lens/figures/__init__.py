"""Figures of a model. Each function takes plain arrays and labels and returns a `Figure` with a `save` method.

Colour-blind readers can tell the colours apart. Queries and layers run down; keys, heads and positions to the right.
"""

from glassformer.lens.figure import Figure, FigureError
from glassformer.lens.figures.attention import attention_head, attention_sheet, head_scores, induction_stripe
from glassformer.lens.figures.depth import deviation_by_depth, norms_by_depth, singular_values
from glassformer.lens.figures.positions import position_heatmap, relative_offset
from glassformer.lens.figures.stream import attribution_bars, logit_lens_grid, patching_map
from glassformer.lens.figures.training import training_curves

__all__ = [
    "Figure",
    "FigureError",
    "attention_head",
    "attention_sheet",
    "attribution_bars",
    "deviation_by_depth",
    "head_scores",
    "induction_stripe",
    "logit_lens_grid",
    "norms_by_depth",
    "patching_map",
    "position_heatmap",
    "relative_offset",
    "singular_values",
    "training_curves",
]
