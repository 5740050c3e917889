"""Whether a picture can be read, measured with the renderer: text inside the canvas, and no text on another."""

from matplotlib.text import Text

from glassformer.lens.figures import Figure

SLACK = 1.0
"""Pixels: boxes of text include a margin of about that."""


def texts(figure: Figure) -> list[Text]:
    """Every text that is drawn; tick labels outside the view are not."""
    canvas = figure.canvas
    canvas.draw_without_rendering()
    ticks, undrawn = [], set()
    for ax in canvas.axes:
        for axis in (ax.xaxis, ax.yaxis):
            undrawn |= {
                id(t) for tick in axis.get_major_ticks() + axis.get_minor_ticks() for t in (tick.label1, tick.label2)
            }
            ticks += [
                t for tick in axis._update_ticks() for t in (tick.label1, tick.label2) if t.get_visible() and ax.axison
            ]
    off = {id(t) for ax in canvas.axes if not ax.axison for axis in (ax.xaxis, ax.yaxis) for t in axis.findobj(Text)}
    others = [t for t in canvas.findobj(Text) if id(t) not in undrawn | off]
    return [t for t in ticks + others if t.get_visible() and t.get_text().strip()]


def problems(figure: Figure) -> list[str]:
    """One sentence per text that is clipped or lies on another."""
    found = texts(figure)
    boxes = [text.get_window_extent() for text in found]
    whole = figure.canvas.bbox
    problems_found = []
    for text, box in zip(found, boxes, strict=True):
        outside = max(whole.x0 - box.x0, whole.y0 - box.y0, box.x1 - whole.x1, box.y1 - whole.y1)
        if outside > SLACK:
            problems_found.append(f"{text.get_text()!r} is {outside:.0f} pixels outside the picture")
    order = sorted(range(len(found)), key=lambda i: boxes[i].x0)
    for place, i in enumerate(order):
        for j in order[place + 1 :]:
            a, b = boxes[i], boxes[j]
            if b.x0 >= a.x1 - SLACK:
                break
            if min(a.y1, b.y1) - max(a.y0, b.y0) > SLACK and min(a.x1, b.x1) - b.x0 > SLACK:
                problems_found.append(f"{found[i].get_text()!r} and {found[j].get_text()!r} overlap")
    return problems_found
