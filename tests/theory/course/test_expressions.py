"""Formulas of students: read without being run, refused with one sentence, bounded in time and size."""

import random
import time

import mpmath
import pytest
import sympy

from glassformer.theory.course import expressions
from glassformer.theory.course.expressions import UnreadableError, evaluate, number, parse


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3,145,728", 3145728),
        ("1/4", 0.25),
        ("25 %", 0.25),
        ("2^3^2", 512),
        ("-2^2", -4),
        ("2^-1", 0.5),
        ("1e-3", 0.001),
        ("2e", 5.43656365691809),
        ("e/(e+1)", 0.731058578630005),
        ("√2", 1.41421356237310),
        ("3(4+1)", 15),
        ("min(3, 5, 2) + max(1,2)", 4),
        ("ln(10)/12", 0.191882),
        ("10^11", 1e11),
        ("2 × 3 − 1", 5),
        ("cos(π)", -1),
        ("log2(8)", 3),
    ],
)
def test_numbers(text, value):
    assert float(number(text)) == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize(
    "text",
    ["", "   ", "2+", "(1", "1)", "a b", "1 / 0", "sqrt(-1)", "ln(0)", "sin(1, 2)", "__import__('os')", "x.y", "1;2",
     "lambda: 1", "'a'", "exp(exp(exp(99)))", "9^9^9^9^9", "1e99999", "(" * 300 + "1" + ")" * 90, "1" * 500,
     "10^(10^10)", "max()", "1 if 1 else 2", "é", "-" * 399 + "1"],
)  # fmt: skip
def test_unreadable_texts_are_refused_quickly_with_one_sentence(text):
    before = time.process_time()
    with pytest.raises(UnreadableError) as caught:
        number(text)
    assert time.process_time() - before < 1
    assert str(caught.value).endswith(".") or "Did you mean" in str(caught.value) or "Known names" in str(caught.value)


def test_names_are_a_fixed_list():
    assert float(evaluate(parse("2d_k + N", ("d_k", "N")), {"d_k": 3, "N": 4})) == 10
    with pytest.raises(UnreadableError, match="'M' is not known"):
        parse("M", ("N",))


def random_formula(rng, depth):
    if depth == 0:
        return rng.choice(["x", "y", "2", "7", "(1/2)"])
    a, b = random_formula(rng, depth - 1), random_formula(rng, depth - 1)
    return rng.choice([f"({a} + {b})", f"({a} - {b})", f"({a}) * ({b})", f"sqrt(({a})^2 + 1)", f"-({a})", f"({a})/7"])


def test_values_are_those_of_sympy():
    rng = random.Random(0)
    x, y = sympy.symbols("x y")
    for _ in range(60):
        text = random_formula(rng, 3)
        tree = parse(text, ("x", "y"))
        expected = sympy.sympify(text.replace("^", "**")).subs({x: sympy.Rational(3, 7), y: 2}).evalf(30)
        mine = evaluate(tree, {"x": sympy.Rational(3, 7), "y": 2})
        assert abs(sympy.Float(mpmath.nstr(mine, 35), 30) - expected) < 1e-20 * (1 + abs(expected))
        shown = expressions.to_sympy(tree).subs({x: sympy.Rational(3, 7), y: 2}).evalf(30)
        assert abs(shown - expected) < 1e-20 * (1 + abs(expected))
