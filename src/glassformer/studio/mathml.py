"""Formulas for the page: LaTeX as MathML, and text split into plain text and formulas, never HTML."""

from functools import lru_cache
from typing import Any

from markupsafe import Markup

from glassformer.pages import mathml as converter


@lru_cache(maxsize=4096)
def mathml(latex: str, display: bool = False) -> str:
    """Return a formula as a <math> element; if the converter cannot parse it, as plain text inside one."""
    try:
        return str(converter.mathml(latex, block=display))
    except Exception:  # show the LaTeX source instead
        text = Markup('<math xmlns="http://www.w3.org/1998/Math/MathML"><mtext>{}</mtext></math>').format(latex)
        return str(text)


def pieces(text: str) -> list[dict[str, Any]]:
    """Split a text of the package into pieces: {"text"} and {"mathml", "display"}."""
    from glassformer.theory.claims.formulas import split

    out: list[dict[str, Any]] = []
    for kind, piece in split(text.strip()):
        block = kind == "display"
        out.append({"text": piece} if kind == "text" else {"mathml": mathml(piece, block), "display": block})
    return out
