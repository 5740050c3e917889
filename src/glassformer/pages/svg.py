"""Figures of the report: numbers in, one inline SVG out. No script; colours come from the page's custom properties."""

import html
import math
import re
from collections.abc import Sequence

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
LEVELS = 10
"""Shades of an attention map: each is one path, which keeps sixteen maps of 32 x 32 under 100 kB."""

Points = Sequence[tuple[float, float]]


def escape(text: object) -> str:
    """Text for HTML and SVG: markup is shown, not obeyed; what XML cannot carry becomes U+FFFD."""
    return html.escape(_NOT_XML.sub("\ufffd", str(text)), quote=True)


def visible(token: str) -> str:
    """A token with its blanks made visible, short enough for a label."""
    return token.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")[:6]


def _svg(width: float, height: float, title: str, description: str, body: str, kind: str = "") -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="{kind}" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{escape(title)}. {escape(description)}"><title>{escape(title)}</title>'
        f"<desc>{escape(description)}</desc>{body}</svg>"
    )


def _text(x: float, y: float, words: object, anchor: str = "start", kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>'


def loss_curves(train: Points, validation: Points, lines: dict[str, float]) -> str:
    """Training and validation loss over the steps; each baseline a dashed line with its name and value."""
    width, height, left, right, top, bottom = 560.0, 330.0, 34.0, 120.0, 30.0, 44.0
    points = [*train, *validation]
    last = max(step for step, _ in points)
    values = [loss for _, loss in points] + list(lines.values())
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
    for name, value in sorted(lines.items(), key=lambda item: -item[1]):
        below = max(below + 18, y(value) + 4)  # labels do not overlap
        body.append(f'<path class="baseline" d="M{left:g} {y(value):.1f}H{width - right:g}"/>')
        body.append(_text(width - right + 6, below, f"{name} {value:.2f}"))
    body.append(f'<path class="train" d="{_line([(x(a), y(b)) for a, b in train])}"/>')
    body.append(f'<path class="validation" d="{_line([(x(a), y(b)) for a, b in validation])}"/>')
    body += [
        f'<circle class="dot" cx="{x(a):.1f}" cy="{y(b):.1f}" r="3.5"><title>step {a:,}: {b:.3f}</title></circle>'
        for a, b in validation
    ]
    body.append(f'<path class="train" d="M{left + 8:g} 14h22"/>' + _text(left + 36, 18, "training"))
    body.append(f'<path class="validation" d="M{left + 118:g} 14h22"/>')
    body.append(f'<circle class="dot" cx="{left + 129:g}" cy="14" r="3.5"/>' + _text(left + 146, 18, "validation"))
    told = ", ".join(f"{name} {value:.2f}" for name, value in lines.items())
    description = (
        f"Validation falls from {validation[0][1]:.2f} to {validation[-1][1]:.2f} nats. Lines to beat: {told}."
    )
    return _svg(width, height, "Loss over the steps, in nats per character", description, "".join(body), "chart")


def tick_step(spread: float) -> float:
    """The distance of two grid lines: 1, 2 or 5 times a power of ten, such that 3 to 8 of them cover the spread."""
    power = 10.0 ** math.floor(math.log10(spread / 4)) if spread > 0 else 0.1
    return power * next(factor for factor in (1, 2, 5, 10) if spread <= 6 * factor * power)


def _line(points: Points) -> str:
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points)


def _shades(pattern: list[list[float]], size: float, x0: float = 0, y0: float = 0) -> str:
    """The cells of a pattern, gathered by shade: weight w at opacity about sqrt(w), so that faint ones show."""
    paths: dict[int, list[str]] = {}
    for t, row in enumerate(pattern):
        for s, weight in enumerate(row):
            level = round(LEVELS * math.sqrt(min(max(weight, 0.0), 1.0)))
            if level:
                paths.setdefault(level, []).append(f"M{x0 + s * size:g} {y0 + t * size:g}h{size:g}v{size:g}h-{size:g}z")
    drawn = [f'<path fill-opacity="{level / LEVELS:g}" d="{"".join(d)}"/>' for level, d in sorted(paths.items())]
    return f'<g class="cells">{"".join(drawn)}</g>'


def small_map(pattern: list[list[float]], name: str) -> str:
    """One head: readers from top to bottom, what they read from left to right."""
    n = len(pattern)
    frame = f'<path class="frame" d="M0 0V{n}H{n}"/>'
    return _svg(n, n, f"Attention of {name}", "Darker is more weight.", frame + _shades(pattern, 1), "small-map")


def large_map(pattern: list[list[float]], tokens: list[str], name: str) -> str:
    """One head with its tokens along both sides; heavy cells name their weight on hover."""
    n, cell, margin = len(pattern), 15.0, 30.0
    side = margin + n * cell + 2
    body = [_shades(pattern, cell, margin, margin), f'<path class="frame" d="M{margin} {margin}V{side}H{side}"/>']
    for i, token in enumerate(tokens):
        at = margin + (i + 0.5) * cell
        body.append(_text(margin - 5, at + 4, visible(token), "end", "token"))
        body.append(_text(at, margin - 6, visible(token), "middle", "token"))
    for t, row in enumerate(pattern):
        for s, weight in enumerate(row):
            if weight >= 0.05:
                words = f"{visible(tokens[t])} at {t} reads {visible(tokens[s])} at {s}: {weight:.2f}"
                place = f'x="{margin + s * cell:g}" y="{margin + t * cell:g}" width="{cell:g}" height="{cell:g}"'
                body.append(f'<rect class="hover" {place}><title>{escape(words)}</title></rect>')
    description = "Each row is a character that reads; darker cells in it are the earlier characters it reads from."
    return _svg(side, side, f"Attention of {name} with tokens", description, "".join(body), "large-map")


def bars(probabilities: list[float], name: str) -> str:
    """A distribution as eight bars; what a sampler removed is a dot on the ground."""
    wide, high = 14.0, 44.0
    body = []
    for i, p in enumerate(probabilities):
        x = i * wide + 1
        if p > 0:
            tall = max(p * high, 0.8)
            body.append(f'<rect class="bar" x="{x:g}" y="{high - tall:.1f}" width="{wide - 3:g}" height="{tall:.1f}"/>')
        else:
            body.append(f'<circle class="none" cx="{x + 5.5:g}" cy="{high - 2:g}" r="1.3"/>')
    told = ", ".join(f"{100 * p:.0f}" for p in probabilities)
    return _svg(
        len(probabilities) * wide, high, f"Eight tokens under {name}", f"Percent: {told}.", "".join(body), "bars"
    )


def race_bars(rows: Sequence[tuple[str, float, float]]) -> str:
    """Two bars for each length: seconds recomputed and seconds cached."""
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
    told = "; ".join(f"{name}: {a:.2f} s recomputed, {b:.2f} s cached" for name, a, b in rows)
    return _svg(width, len(rows) * row, "Seconds without and with a cache", told, "".join(body), "chart")
