"""What students type in other notations is read as what it means."""

import pytest

from glassformer.theory.course import notation
from glassformer.theory.course.answers import Formula, Matrix, Number
from glassformer.theory.course.expressions import UnreadableError, number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"\frac{1}{4}", 0.25),
        (r"$\frac12$", 0.5),
        (r"\tfrac{1}{\sqrt{4}}", 0.5),
        (r"\frac{\frac{1}{2}}{2}", 0.25),
        (r"e^{2} \cdot \left(1 + \ln(1)\right)", 7.38905609893065),
        (r"2\pi", 6.283185307179586),
        (r"10^{11}", 1e11),
        ("½", 0.5),
        ("2 ¼", 0.5),
        ("p = 1/4", 0.25),
        ("≈ 0.25", 0.25),
        ("84.3°", 84.3),
        ("84.3 degrees", 84.3),
        ("7 billion", 7e9),
        ("1.5 million parameters", 1.5e6),
        ("3 tokens.", 3),
    ],
)
def test_numbers_in_other_notations(text, value):
    assert float(number(text)) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("text", ["{" * 90 + "1", "\\frac", "\\frac{1", "\\", "{}", "\\frac{1}{}", "3 apples"])
def test_what_is_not_a_number_is_refused_with_a_sentence(text):
    with pytest.raises(UnreadableError):
        number(text)


def test_a_decimal_comma_is_named_and_a_group_of_digits_is_not():
    with pytest.raises(UnreadableError, match=r"write 0\.25"):
        number("0,25")
    assert not notation.is_decimal_comma("1,024")
    assert not notation.is_decimal_comma("247,086")
    assert notation.is_decimal_comma("0,333")
    assert float(number("247,086")) == 247086


def test_a_letter_in_a_number_is_named():
    with pytest.raises(UnreadableError, match="'d' is a letter, and the answer is a number"):
        number("4d^2")


@pytest.mark.parametrize(
    "text", ["(1, 2)", "[1, 2]", "1; 2", "(1; 2)", "[1, 2]^T", r"(1, 2)^\top", "(sqrt(1), 2)", "1 2"]
)
def test_vectors(text):
    answer = Matrix([[1, 2]])
    assert answer.same(answer.read(text), answer.value), answer.read(text)


@pytest.mark.parametrize("text", ["(1, 0), (0, 1)", "((1, 0), (0, 1))", "[(1,0),(0,1)]", "(1,0);(0,1)"])
def test_lists_of_vectors(text):
    answer = Matrix([[1, 0], [0, 1]])
    assert answer.same(answer.read(text), answer.value), answer.read(text)


def test_letters_of_a_formula_may_have_the_other_case_and_an_index():
    assert Formula("N^2", {"N": "whole"}).same(Formula("N^2", {"N": "whole"}).read("n^2"), "N^2")
    indexed = Formula("1/sqrt(d_k)", {"d_k": "whole"})
    assert indexed.same(indexed.read(r"\frac{1}{\sqrt{d_{k}}}"), indexed.value)
    with pytest.raises(UnreadableError, match="'m' is not known"):
        Formula("n", {"n": "whole"}).read("m")


def test_a_wrong_number_in_another_notation_stays_wrong():
    answer = Number(7 * 10**9)
    assert not answer.same(answer.read("7 million"), answer.value)
