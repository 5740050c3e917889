"""Formulas for the page: LaTeX to MathML, and text split into plain text and formulas, never HTML."""

from functools import lru_cache
from typing import Any


@lru_cache(maxsize=4096)
def mathml(latex: str, display: bool = False) -> str:
    """Return a formula as a <math> element; if the converter cannot parse it, as plain text inside one."""
    from html import escape

    from latex2mathml.converter import convert

    try:
        return str(convert(latex, display="block" if display else "inline"))
    except Exception:  # show the LaTeX source instead
        return f'<math xmlns="http://www.w3.org/1998/Math/MathML"><mtext>{escape(latex)}</mtext></math>'


def pieces(text: str) -> list[dict[str, Any]]:
    """Split a text of the package into pieces: {"text"} and {"mathml", "display"}."""
    from glassformer.theory.claims.formulas import split

    out: list[dict[str, Any]] = []
    for kind, piece in split(text.strip()):
        if kind == "text":
            out.append({"text": piece})
        else:
            out.append({"mathml": mathml(piece, kind == "display"), "display": kind == "display"})
    return out
