"""Formulas become MathML in which their text stays text."""

from xml.etree import ElementTree

import pytest

from glassformer.pages.mathml import available, mathml
from tests.pages.hostile import read


def test_a_formula_is_a_math_element():
    drawn = mathml(r"\frac{a}{b} < c")
    assert available()
    assert [tag for tag, _ in read(drawn).tags][:1] == ["math"]
    assert "<mfrac>" in drawn
    assert "&lt;" in drawn
    assert 'display="block"' in mathml("x", block=True)


@pytest.mark.parametrize(
    "latex",
    [
        r"\text{<script>alert(1)</script>}",
        r"\text{&lt;script&gt;}",
        r"\mathrm{x}\text{</math><img src=x onerror=y>}",
        r"\href{javascript:alert(1)}{x}",
        r"\style{background:url(x)}{x}",
        r"\class{a}{x}",
        "\\text{\x00\ud800}",
    ],
)
def test_text_in_a_formula_is_never_markup(latex):
    drawn = mathml(latex)
    root = ElementTree.fromstring(drawn)  # well-formed
    assert all(element.tag.rpartition("}")[2].startswith("m") for element in root.iter())
    assert not {name for element in root.iter() for name in element.attrib} & {"href", "style", "class", "onerror"}
    drawn.encode("utf-8")


def test_matrices_and_symbols_keep_their_text():
    drawn = mathml(r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} \geq \alpha")
    assert "≥" in drawn
    assert "α" in drawn
    assert drawn.count("<mtd>") == 4
