"""How a wrong answer is related to the right one."""

from fractions import Fraction

import mpmath
import pytest

from glassformer.theory.course.answers import Formula, Matrix, Number


@pytest.mark.parametrize(
    ("value", "text", "words"),
    [
        (12, "-12", "The sign is wrong"),
        (12, "24", "twice"),
        (Fraction(1, 3), "0.1667", "half"),
        (Fraction(1, 4), "25", "a percentage with the sign %"),
        (40, "40 %", "a hundredth"),
        (Fraction(2, 7), "3.5", "reciprocal"),
        (0.3, "0.09", "the square of"),
        (0.3, "0.5477", "the square root of"),
        (Fraction(2, 7), "5/7", "1 minus"),
        (1.3, "74.48", "degrees and radians"),
        (84.3, "1.4713", "degrees and radians"),
        (100_000, "100001", "every unit counts"),
        (0.4637, "0.45", "three digits"),
        (0.4637, "7.9", "too large"),
        (0.4637, "0.111", "too small"),
        (0.4637, "-7.9", "the sign is wrong as well"),
    ],
)
def test_numbers(value, text, words):
    answer = Number(value)
    assert words in answer.comment(answer.read(text))
    assert not answer.same(answer.read(text), answer.value)


def test_a_value_of_zero_has_no_relations():
    assert Number(0).comment(mpmath.mpf(3)) == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("3*n", "This is 3 times the right formula"),
        ("n/7", "This is 1/7 times the right formula"),
        ("pi*n", "This is 3.14159 times the right formula"),
        ("-n", "The sign is wrong"),
        ("n^2", "the square of"),
        ("sqrt(n)", "the square root of"),
        ("1/n", "the reciprocal of"),
        ("n+1", "For n = "),
        ("0*n", "For n = "),
    ],
)
def test_formulas(text, words):
    answer = Formula("n", {"n": "whole"})
    assert words in answer.comment(answer.read(text))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1 3; 2 4", "transpose"),
        ("-1 -2; -3 -4", "Every sign"),
        ("2.5 5; 7.5 10", "Every entry is 2.5 times"),
        ("3 4; 1 2", "The rows are right, but in another order"),
        ("2 1; 4 3", "The columns are right, but in another order"),
        ("1 2; 3 5", "1 of 4 entries differ; the first is in row 2, column 2"),
        ("1 2", "1 by 2; 2 by 2 is needed"),
    ],
)
def test_matrices(text, words):
    answer = Matrix([[1, 2], [3, 4]])
    assert words in answer.comment(answer.read(text))


def test_vectors_in_another_order():
    answer = Matrix([[1, 2, 5]])
    assert answer.comment(answer.read("5, 2, 1")) == "The numbers are in another order."
    assert "differ" in answer.comment(answer.read("5, 2, 2"))
