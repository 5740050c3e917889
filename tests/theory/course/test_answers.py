"""The kinds of answers: what they accept, what they refuse, and what they say about a wrong answer."""

from fractions import Fraction

import pytest

from glassformer.theory.course.answers import Choice, Formula, Matrix, Number, TrueFalse, read_rows
from glassformer.theory.course.expressions import UnreadableError


def accepts(answer, text):
    return answer.same(answer.read(text), answer.value)


def test_whole_numbers_are_exact_and_others_have_a_tolerance():
    assert accepts(Number(3145728), "3,145,728")
    assert not accepts(Number(3145728), "3,145,729")
    assert accepts(Number(Fraction(1, 3)), "0.333")
    assert not accepts(Number(Fraction(1, 3)), "0.33")
    assert accepts(Number(0), "0")
    assert not accepts(Number(0), "0.001")


def test_a_wrong_number_is_compared_with_the_right_one():
    answer = Number(12)
    assert answer.comment(answer.read("-12")) == "The sign is wrong."
    assert "twice" in answer.comment(answer.read("24"))
    assert "too large" in answer.comment(answer.read("17"))
    assert "close" in Number(100_000).comment(Number(1).read("100001"))


def test_formulas_are_compared_on_their_domain():
    answer = Formula("sqrt(n^2)", {"n": "positive"})
    assert accepts(answer, "n")
    assert accepts(answer, "f(n) = n")
    assert not accepts(Formula("sqrt(n^2)", {"n": "real"}), "n")
    assert accepts(Formula("sqrt(n^2)", {"n": "real"}), "abs(n)")
    assert accepts(Formula("n*(n+1)/2", {"n": "whole"}), "(n^2+n)/2")
    assert not accepts(Formula("min(n, d)", {"n": "whole", "d": "whole"}), "n")
    with pytest.raises(UnreadableError, match=r"for n = .*ln"):
        Formula("n", {"n": "real"}).read("exp(ln(n))")
    with pytest.raises(UnreadableError, match="divides by zero"):
        Formula("n", {"n": "real"}).read("n^2/n")


def test_a_wrong_formula_is_refuted_at_a_point():
    answer = Formula("n^2", {"n": "whole"})
    assert "it gives" in answer.comment(answer.read("2n"))


@pytest.mark.parametrize("text", ["1 2; 3 4", "[[1, 2], [3, 4]]", "1, 2\n3, 4", "[1 2; 3 4]", "2/2 2; 3 8/2"])
def test_matrices(text):
    answer = Matrix([[1, 2], [3, 4]])
    assert accepts(answer, text)


def test_wrong_matrices():
    answer = Matrix([[1, 2], [3, 4]])
    assert "transpose" in answer.comment(answer.read("1 3; 2 4"))
    assert "row 2, column 1" in answer.comment(answer.read("1 2; 9 4"))
    assert "1 by 2" in answer.comment(answer.read("1 2"))
    with pytest.raises(UnreadableError, match="different lengths"):
        read_rows("1 2; 3")


def not_prime(rows):
    n = int(rows[0][0])
    return "" if n > 2 and n % 2 and any(n % k == 0 for k in range(2, n)) else f"{n} is even, or it is prime."


def test_counterexamples_are_checked():
    answer = TrueFalse(False, not_prime, "9", "an odd number")
    assert accepts(answer, "false: 9")
    assert accepts(answer, "FALSE 15")
    assert not accepts(answer, "false: 7")
    assert "7 is even, or it is prime" in answer.comment(answer.read("false: 7"))
    assert not accepts(answer, "true")
    with pytest.raises(UnreadableError, match="a counterexample is needed"):
        answer.read("false")
    with pytest.raises(UnreadableError, match="true or false"):
        answer.read("maybe")


def test_choices_need_the_right_reason():
    answer = Choice({"x": "X", "y": "Y"}, "y", {"p": "P", "q": "Q"}, "p")
    assert accepts(answer, "b 1")
    assert accepts(answer, "(B) (1)")
    assert not accepts(answer, "b2")
    assert not accepts(answer, "a1")
    assert answer.same(answer.read("b 2"), "q")
    assert not answer.same(answer.read("a 2"), "q")
    for text in ("c 1", "b", "b 3", "", "b 1 2"):
        with pytest.raises(UnreadableError):
            answer.read(text)
