"""Formulas for the page: LaTeX to MathML, and texts in pieces so that user text never is HTML."""

from functools import lru_cache
from typing import Any


@lru_cache(maxsize=4096)
def mathml(latex: str, display: bool = False) -> str:
    """One formula as a <math> element; as plain text in one where the converter cannot read it."""
    from html import escape

    from latex2mathml.converter import convert

    try:
        return str(convert(latex, display="block" if display else "inline"))
    except Exception:  # a formula that the converter cannot read is still worth reading
        return f'<math xmlns="http://www.w3.org/1998/Math/MathML"><mtext>{escape(latex)}</mtext></math>'


def pieces(text: str) -> list[dict[str, Any]]:
    """A text of ours as pieces: {"text"} and {"mathml", "display"}."""
    from glassformer.theory.claims.formulas import split

    out: list[dict[str, Any]] = []
    for kind, piece in split(text.strip()):
        if kind == "text":
            out.append({"text": piece})
        else:
            out.append({"mathml": mathml(piece, kind == "display"), "display": kind == "display"})
    return out
