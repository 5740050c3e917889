"""The display of a trace in a notebook: its attention patterns as pictures, and the sites with their shapes."""

import re
from typing import TYPE_CHECKING

from markupsafe import Markup

from glassformer.lens.figure import FigureError
from glassformer.pages.display import picture, render

if TYPE_CHECKING:
    from glassformer.lens.trace import Trace

PATTERN = re.compile(r"(?P<stack>(?:encoder\.|decoder\.)?)blocks\.(?P<layer>\d+)\.(?P<part>attention|cross)\.pattern")
NAMES = {
    "encoder.attention": "Attention in the encoder",
    "decoder.attention": "Attention in the decoder",
    "decoder.cross": "Cross-attention",
}
MOST_HEADS = 64
"""Attention maps of one stack. More of them would be too small to read and the picture too large to store."""


def display(trace: "Trace") -> str:
    """Return an HTML fragment: the attention of the first batch element, and a table of the recorded tensors."""
    return render("display_trace.html", trace=trace, sites=list(trace.sites.values()), pictures=_pictures(trace))


def _pictures(trace: "Trace") -> list[Markup]:
    """Draw one sheet of attention maps for each stack that has recorded patterns."""
    stacks: dict[str, list[int]] = {}
    for match in filter(None, map(PATTERN.fullmatch, trace)):
        stacks.setdefault(f"{match['stack']}{match['part']}", []).append(int(match["layer"]))
    return [drawn for stack, layers in stacks.items() if (drawn := _sheet(trace, stack, layers))]


def _sheet(trace: "Trace", stack: str, layers: list[int]) -> Markup | None:
    """Draw the heads of these layers; of a large model, as many of the first layers as fit into one picture."""
    import torch

    from glassformer.lens.figures.attention import attention_sheet

    prefix, _, part = stack.rpartition(".")
    start = f"{prefix}.blocks" if prefix else "blocks"
    heads = trace[f"{start}.{layers[0]}.{part}.pattern"].shape[1]
    shown = layers[: max(1, MOST_HEADS // heads)]
    maps = [trace[f"{start}.{layer}.{part}.pattern"][0].detach().float().cpu() for layer in shown]
    few = f"the first {len(shown)} of {len(layers)} layers" if len(shown) < len(layers) else f"{len(shown)} layers"
    few = f"layer {shown[0]}" if len(layers) == 1 else few
    queries, keys = maps[0].shape[-2:]
    title = f"{NAMES.get(stack, 'Attention')}: {heads} heads of {few}, {queries} queries by {keys} keys"
    try:
        figure = attention_sheet(torch.stack(maps)[:, :MOST_HEADS], title=title, layers=shown)
    except FigureError:  # NaN or infinite weights, or an edit that made other values of them
        return None
    return picture(figure.svg(), f"{title}. Brighter cells have more weight.", 640)
