"""Draw the figures of the HTML pages as inline SVG. No script; colours come from the style sheet of the page.

`attention_map` is the only function here that draws a matrix: attention patterns and the doctor's leak matrix use it.
"""

import html
import math
from collections.abc import Callable, Sequence

from markupsafe import Markup

from glassformer.pages.page import clean

LEVELS = 10
"""Opacity levels of an attention map. Each is one path, which keeps sixteen maps of 32 x 32 under 100 kB."""

Points = Sequence[tuple[float, float]]
Matrix = Sequence[Sequence[float]]


def escape(text: object) -> str:
    """Escape text for HTML and SVG, and replace what XML cannot contain with U+FFFD."""
    return html.escape(clean(text), quote=True)


def visible(token: str) -> str:
    """Return a token as a short label in which white space is visible."""
    return token.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")[:6]


def _svg(width: float, height: float, title: str, description: str, body: str, kind: str) -> Markup:
    return Markup(
        f'<svg xmlns="http://www.w3.org/2000/svg" class="{kind}" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{escape(title)}. {escape(description)}"><title>{escape(title)}</title>'
        f"<desc>{escape(description)}</desc>{body}</svg>"
    )


def _text(x: float, y: float, words: object, anchor: str = "start", kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>'


def _polyline(points: Points) -> str:
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points)


def loss_curves(train: Points, validation: Points, baselines: dict[str, float]) -> Markup:
    """Plot training and validation loss over the steps, and each baseline as a dashed line with name and value."""
    width, height, left, right, top, bottom = 560.0, 330.0, 34.0, 120.0, 30.0, 44.0
    points = [*train, *validation]
    last = max(step for step, _ in points)
    values = [loss for _, loss in points] + list(baselines.values())
    step = tick_step(max(values) - min(values))
    low = step * math.floor(min(values) / step)
    high = max(step * math.ceil(max(values) / step), low + step)

    def x(step: float) -> float:
        return left + (width - left - right) * step / last

    def y(loss: float) -> float:
        return top + (height - top - bottom) * (high - loss) / (high - low)

    body = []
    for number in range(round((high - low) / step) + 1):
        tick = low + number * step
        body.append(f'<path class="grid" d="M{left:g} {y(tick):.1f}H{width - right:g}"/>')
        body.append(_text(left - 6, y(tick) + 4, f"{tick:.3g}", "end"))
    for part in range(5):
        at = round(last * part / 4)
        body.append(_text(x(at), height - bottom + 19, f"{at:,}", "middle"))
    body.append(_text((left + width - right) / 2, height - 4, "steps", "middle"))
    below = -math.inf
    for name, value in sorted(baselines.items(), key=lambda item: -item[1]):
        below = max(below + 18, y(value) + 4)  # labels do not overlap
        body.append(f'<path class="baseline" d="M{left:g} {y(value):.1f}H{width - right:g}"/>')
        body.append(_text(width - right + 6, below, f"{name} {value:.2f}"))
    body.append(f'<path class="train" d="{_polyline([(x(a), y(b)) for a, b in train])}"/>')
    body.append(f'<path class="validation" d="{_polyline([(x(a), y(b)) for a, b in validation])}"/>')
    body += [
        f'<circle class="dot" cx="{x(a):.1f}" cy="{y(b):.1f}" r="3.5"><title>step {a:,}: {b:.3f}</title></circle>'
        for a, b in validation
    ]
    body.append(f'<path class="train" d="M{left + 8:g} 14h22"/>' + _text(left + 36, 18, "training"))
    body.append(f'<path class="validation" d="M{left + 118:g} 14h22"/>')
    body.append(f'<circle class="dot" cx="{left + 129:g}" cy="14" r="3.5"/>' + _text(left + 146, 18, "validation"))
    named = ", ".join(f"{name} {value:.2f}" for name, value in baselines.items())
    description = (
        f"The validation loss falls from {validation[0][1]:.2f} to {validation[-1][1]:.2f} nats. Baselines: {named}."
    )
    return _svg(width, height, "Loss over the steps, in nats per character", description, "".join(body), "chart")


def tick_step(spread: float) -> float:
    """Return the distance of two grid lines: 1, 2 or 5 times a power of ten, 3 to 8 of which cover the spread."""
    power = 10.0 ** math.floor(math.log10(spread / 4)) if spread > 0 else 0.1
    return power * next(factor for factor in (1, 2, 5, 10) if spread <= 6 * factor * power)


def attention_map(
    weights: Matrix,
    title: str,
    description: str = "Darker cells have more weight.",
    *,
    labels: Sequence[object] = (),
    row_axis: str = "",
    column_axis: str = "",
    hover: Callable[[int, int], str] | None = None,
    hover_from: float = 0.05,
    faintest: float = 0.0,
    mark_future: bool = False,
) -> Markup:
    """Draw a square matrix of weights between 0 and 1: queries from top to bottom, keys from left to right.

    A weight w has opacity sqrt(w), so that small weights are visible; NaN and infinity are drawn as 1. `faintest` is
    the least opacity of a weight above 0. Without `labels` the map is small and bare. With them, one for each
    position, it has labels along both axes and the text `hover(row, column)` for each weight of at least
    `hover_from`. `mark_future` draws the cells above the diagonal in the colour of a failure.
    """
    n = len(weights)
    cell, left, top = (15.0, 30.0, 30.0) if labels else (1.0, 0.0, 0.0)
    if row_axis or column_axis:
        left, top = left + 16, top + 16
    right, bottom = left + n * cell, top + n * cell
    body = [_cells(weights, cell, left, top, faintest, mark_future)]
    body.append(f'<path class="frame" d="M{left:g} {top:g}V{bottom:g}H{right:g}"/>')
    for i, label in enumerate(labels):
        middle = (i + 0.5) * cell
        body.append(_text(left - 5, top + middle + 4, label, "end", "token"))
        body.append(_text(left + middle, top - 6, label, "middle", "token"))
    if column_axis:
        body.append(_text(left, 13, column_axis))
    if row_axis:
        body.append(f'<text transform="translate(13 {bottom:g}) rotate(-90)">{escape(row_axis)}</text>')
    for t, row in enumerate(weights):
        for s, weight in enumerate(row):
            if hover is not None and not weight < hover_from:
                box = f'x="{left + s * cell:g}" y="{top + t * cell:g}" width="{cell:g}" height="{cell:g}"'
                body.append(f'<rect class="hover" {box}><title>{escape(hover(t, s))}</title></rect>')
    edge = 2 if labels else 0
    return _svg(right + edge, bottom + edge, title, description, "".join(body), "large-map" if labels else "small-map")


def _cells(weights: Matrix, size: float, left: float, top: float, faintest: float, mark_future: bool) -> str:
    """Draw all cells of one opacity and colour as a single path."""
    paths: dict[tuple[str, int], list[str]] = {}
    for t, row in enumerate(weights):
        for s, weight in enumerate(row):
            strength = math.sqrt(min(max(weight, 0.0), 1.0)) if math.isfinite(weight) else 1.0
            level = round(LEVELS * (max(strength, faintest) if strength > 0 else 0.0))
            if level:
                kind = "cells future" if mark_future and s > t else "cells"
                square = f"M{left + s * size:g} {top + t * size:g}h{size:g}v{size:g}h-{size:g}z"
                paths.setdefault((kind, level), []).append(square)
    return "".join(
        f'<path class="{kind}" fill-opacity="{level / LEVELS:g}" d="{"".join(squares)}"/>'
        for (kind, level), squares in sorted(paths.items())
    )


def probability_bars(probabilities: Sequence[float], name: str) -> Markup:
    """Draw a distribution as bars; a dot marks a token of probability 0."""
    wide, high = 14.0, 44.0
    body = []
    for i, p in enumerate(probabilities):
        x = i * wide + 1
        if p > 0:
            tall = max(p * high, 0.8)
            body.append(f'<rect class="bar" x="{x:g}" y="{high - tall:.1f}" width="{wide - 3:g}" height="{tall:.1f}"/>')
        else:
            body.append(f'<circle class="none" cx="{x + 5.5:g}" cy="{high - 2:g}" r="1.3"/>')
    percent = ", ".join(f"{100 * p:.0f}" for p in probabilities)
    title = f"Probabilities of {len(probabilities)} tokens with {name}"
    return _svg(len(probabilities) * wide, high, title, f"Percent: {percent}.", "".join(body), "bars")


def timing_bars(rows: Sequence[tuple[str, float, float]]) -> Markup:
    """Draw two bars for each row (name, seconds without a cache, seconds with a cache)."""
    width, left, right, row = 560.0, 98.0, 70.0, 50.0
    longest = max(max(a, b) for _, a, b in rows)
    body = []
    for i, (name, recomputed, cached) in enumerate(rows):
        top = i * row + 4
        body.append(_text(left - 8, top + 24, name, "end"))
        for offset, seconds, kind in ((0, recomputed, "slow"), (19, cached, "fast")):
            long = (width - left - right) * seconds / longest
            body.append(f'<rect class="{kind}" x="{left:g}" y="{top + offset:g}" width="{long:.1f}" height="16"/>')
            body.append(_text(left + long + 6, top + offset + 13, f"{seconds:.2f} s"))
    description = "; ".join(f"{name}: {a:.2f} s recomputed, {b:.2f} s cached" for name, a, b in rows)
    return _svg(width, len(rows) * row, "Seconds without and with a cache", description, "".join(body), "chart")
