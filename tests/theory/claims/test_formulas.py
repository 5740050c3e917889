"""LaTeX to Unicode, case by case, and where formulas stand in a text."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from glassformer.theory.claims.formulas import commands, readable, split, to_unicode


@pytest.mark.parametrize(
    ("latex", "expected"),
    [
        (r"x_1, \dots, x_N", "x₁, …, x_N"),
        (r"\lVert x_n \rVert^2", "‖xₙ‖²"),
        (r"\lvert a \rvert", "|a|"),
        (r"\frac{a + b}{2}", "(a + b)/2"),
        (r"\frac{1}{n}", "1/n"),
        (r"\frac{1}{a b}", "1/(a b)"),
        (r"\frac12", "1/2"),
        (r"\sqrt{d_k}", "√(dₖ)"),
        (r"\sqrt d", "√d"),
        (r"e^{-t^2 / 2}", "e^(−t² / 2)"),
        (r"2^{-53}", "2⁻⁵³"),
        (r"W_v^{\top}", "Wᵥᵀ"),
        (r"a^{n+1}", "aⁿ⁺¹"),
        (r"\sum_{m \ne n} x_m", "Σ_(m ≠ n) xₘ"),
        (r"\operatorname{softmax}_m(x)", "softmaxₘ(x)"),
        (r"a \sin k w", "a sin k w"),
        (r"\mathbb{E}[a] \, \mathbb{R}^D", "𝔼[a] ℝᴰ"),
        (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", "[1 2; 3 4]"),
        (r"\left( \frac{1}{2} \right)", "( 1/2 )"),
        (r"\{1, 2\}", "{1, 2}"),
        (r"x \bmod p", "x mod p"),
        (r"\tilde{x}", "x̃"),
        (r"f'(x)", "f′(x)"),
        (r"\text{gap}", "gap"),
        (r"a=b", "a = b"),
    ],
)
def test_formulas_become_text(latex, expected):
    assert to_unicode(latex) == expected


def test_unknown_commands_keep_their_name_and_are_reported():
    assert to_unicode(r"\wibble x") == "wibble x"
    assert commands(r"\frac{\wibble}{\alpha} \, \{") == {"wibble"}


def test_texts_are_split_at_their_formulas():
    text = "Let $x$ be $$y = 1$$ so."
    assert list(split(text)) == [
        ("text", "Let "), ("inline", "x"), ("text", " be "), ("display", "y = 1"), ("text", " so."),
    ]  # fmt: skip
    assert "".join(piece for _, piece in split(text)) == text.replace("$", "")


def test_displayed_formulas_get_their_own_line():
    assert readable("So $$a^2$$ holds for $a$.") == "So \n\n    a²\n\n holds for a."


@given(st.text(alphabet="ab12\\{}^_&$ frac", max_size=30))
def test_no_text_at_all_crashes_the_converter(text):
    assert isinstance(readable(text), str)
    assert isinstance(to_unicode(text), str)
