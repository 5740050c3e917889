"""What every problem must satisfy, for many draws: used by the test file of each group of problems."""

import re
from fractions import Fraction

import sympy

from glassformer.theory.claims.formulas import commands, split
from glassformer.theory.course import expressions
from glassformer.theory.course.answers import Choice, Formula, Matrix, Number, TrueFalse
from glassformer.theory.course.problem import PLACEHOLDER
from glassformer.theory.course.registry import built_in

DRAWS = 30


def of_group(group: str) -> list:
    """The problems whose numbers a module draws."""
    import tomllib
    from importlib.resources import files

    words = tomllib.loads((files("glassformer.theory.course") / "problems" / f"{group}.toml").read_text("utf-8"))
    return [built_in()[row["id"]] for row in words["problem"]]


def other_forms(task) -> list[str]:
    """The right answer, written in other ways."""
    answer, text = task.drawn.answer, task.reference
    match answer:
        case Number(value=int() as value):
            return [f"{value:,}", f"{value}.0", f"({value} + 1) - 1", f"{2 * value}/2", f"  {value} "]
        case Number(value=value):
            exact = Fraction(value)
            scaled = f"{7 * exact.numerator}/{7 * exact.denominator}" if len(str(exact.denominator)) < 12 else text
            decimals = f"{float(value):.12f}" if abs(value) > 1e-6 else text
            return [f"{float(value):.5g}", decimals, scaled, f"2*({text})/2", f"{100 * float(value):.6g} %"]
        case Formula():
            tree = expressions.to_sympy(expressions.parse(text, tuple(answer.letters)))
            forms = [str(sympy.factor(tree)), str(sympy.expand(tree)), str(sympy.together(tree))]
            return [*forms, f"x = {text}", f"({text})^2/({text})" if "N" not in answer.letters else f"1*({text})"]
        case Matrix():
            rows = [[answer.write([[x]]) for x in row] for row in answer.value]
            nested = "[" + ", ".join("[" + ", ".join(row) + "]" for row in rows) + "]"
            return [nested, "\n".join(" ".join(row) for row in rows), "; ".join(", ".join(row) for row in rows)]
        case TrueFalse():
            return [text.upper(), text.replace(":", " ")]
        case Choice():
            return [text.upper(), f"({text.replace(' ', ') (')})", text.replace(" ", "")]


def check_problem(problem, draws: int) -> None:
    """Right answers and other forms of them are accepted, each wrong answer gets its own explanation."""
    seen, statements = set(), set()
    for seed in range(draws):
        task = problem.task(seed)
        statements.add(task.statement)
        assert task.check(task.reference).right, task.reference
        for form in other_forms(task) if seed < 200 else ():
            assert task.check(form).right, (seed, form, task.reference, task.check(form))
        for key, text in task.wrong.items():
            mark = task.check(text)
            assert (mark.result, mark.mistake) == ("wrong", key), (seed, key, text, mark)
            assert not PLACEHOLDER.search(mark.message)
            seen.add(key)
        assert len({task.check(text).message for text in task.wrong.values()}) == len(task.wrong)
        for text in (task.statement, task.solution, *task.hints):
            assert not PLACEHOLDER.search(text), (problem.id, text)
            assert text.count("$") % 2 == 0, (problem.id, text)
    assert seen == set(problem.wrong), f"{problem.id}: {set(problem.wrong) - seen} never drawn"
    assert len(statements) > 1, f"{problem.id}: every draw has the same statement"
    for text in (problem.statement, problem.solution, *problem.hints):
        for kind, piece in split(text):
            assert kind == "text" or not commands(piece), (problem.id, piece, commands(piece))
        assert not re.search(r"\b(simply|obviously|trivially)\b", text)
