"""Convert LaTeX formulas to MathML that is safe to insert into a page."""

import html
from xml.etree import ElementTree

from markupsafe import Markup

from glassformer.pages.page import clean

ATTRIBUTES = {
    *("accent", "columnalign", "columnlines", "columnspacing", "depth", "display", "displaystyle", "fence", "form"),
    *("height", "linethickness", "lspace", "mathsize", "mathvariant", "maxsize", "minsize", "movablelimits"),
    *("notation", "rowlines", "rowspacing", "rspace", "scriptlevel", "separator", "stretchy", "symmetric", "voffset"),
    *("width", "xmlns"),
}
"""Presentation attributes that are kept. Left out: href, style, class, id and everything that runs code."""


def available() -> bool:
    """Return True if latex2mathml, which `mathml` needs, is installed."""
    try:
        import latex2mathml.converter  # noqa: F401
    except ImportError:
        return False
    return True


def mathml(latex: str, *, block: bool = False) -> Markup:
    """Return a formula as a `<math>` element. Raises whatever latex2mathml raises for a formula it cannot read.

    `latex2mathml.convert` undoes the escaping of its output, so that the text `<script>` in a formula becomes an
    element of the page. This function therefore escapes the element tree itself.
    """
    from latex2mathml.converter import convert_to_element

    root = convert_to_element(clean(latex), display="block" if block else "inline")
    for element in root.iter():
        element.text = html.unescape(element.text) if element.text else element.text  # symbols are stored as &#x003C;
        element.attrib = {name: value for name, value in element.attrib.items() if name in ATTRIBUTES}
    return Markup(clean(ElementTree.tostring(root, encoding="unicode")))
