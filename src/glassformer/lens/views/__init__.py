"""What there is to see in a model: each kind of view measures it and knows how to draw what it measured.

A view is numbers first and a picture second: the command line prints either, and nothing is drawn that was not asked
for. Tokens come in as ids with their words; how text becomes tokens is the caller's affair.
"""

from collections.abc import Callable

from glassformer.lens.views.attention import attention, heads, induction
from glassformer.lens.views.positions import positions
from glassformer.lens.views.stream import attribution, patch, read_depths, rows_apart
from glassformer.lens.views.subject import Choice, Subject, View

KINDS: dict[str, Callable[[Subject, Choice], View]] = {
    "attention": attention,
    "heads": heads,
    "induction": induction,
    "logit-lens": read_depths,
    "rank": rows_apart,
    "positions": positions,
    "attribution": attribution,
    "patch": patch,
}

__all__ = ["KINDS", "Choice", "Subject", "View"]
