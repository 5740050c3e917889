"""Views of a model: each kind of view measures something and can draw a figure of it.

A view consists of numbers and a function that draws them. The command line prints the numbers or saves the figure;
nothing is drawn unless it is requested. Tokens are passed as ids; the caller encodes the text.
"""

from collections.abc import Callable

from glassformer.lens.views.attention import attention, heads, induction
from glassformer.lens.views.positions import positions
from glassformer.lens.views.stream import attribution, logit_lens_view, patch, rank_view
from glassformer.lens.views.subject import Choice, Subject, View

KINDS: dict[str, Callable[[Subject, Choice], View]] = {
    "attention": attention,
    "heads": heads,
    "induction": induction,
    "logit-lens": logit_lens_view,
    "rank": rank_view,
    "positions": positions,
    "attribution": attribution,
    "patch": patch,
}

__all__ = ["KINDS", "Choice", "Subject", "View"]
