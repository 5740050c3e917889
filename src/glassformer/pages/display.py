"""Static displays of results in notebooks: HTML fragments that need no script, no style sheet and no network.

A notebook shows what the method `_repr_html_` or `_repr_svg_` of an object returns. Jupyter, VS Code and code hosts
have light and dark themes, and some remove styles. So the text of a fragment has the colour of the notebook, the few
colours of the templates `display_*.html` are readable on both backgrounds, and nothing depends on a style. A picture
is an `<img>` with its SVG inside: it brings its own background, and its styles cannot reach the notebook.
"""

from urllib.parse import quote

from markupsafe import Markup

from glassformer.pages.page import TEMPLATES, clean, render
from glassformer.pages.svg import escape

__all__ = ["paint", "picture", "render"]


def picture(svg: str, description: str, width: int) -> Markup:
    """Return an SVG element as an `<img>`, `width` pixels wide or as wide as the notebook if that is less."""
    data = quote(clean(svg), safe=" =:/;,'()@!*$+?")  # a third smaller than base64 if the SVG contains an image
    return Markup(
        f'<img src="data:image/svg+xml,{data}" alt="{escape(description)}" width="{width}" '
        'style="max-width:100%;height:auto">'
    )


def paint(svg: str) -> str:
    """Add the style sheet of the pages and a background to a figure of `pages.svg`, so that it can stand alone."""
    style = (TEMPLATES / "style.css").read_text(encoding="utf-8")
    head, end, body = svg.partition(">")
    fonts = "svg text, svg .token { font-size: 9px; }"
    return f"{head}{end}<style>{style} {fonts} svg {{ background: var(--paper); }}</style>{body}"
