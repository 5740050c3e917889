"""Problems: draws are reproducible, placeholders are filled, and files of a teacher are read or refused."""

from fractions import Fraction

import pytest

from glassformer.theory.course.answers import Number
from glassformer.theory.course.problem import CourseError, Drawn, Problem, load, shown
from glassformer.theory.course.registry import built_in

WORDS = """
[[problem]]
id = "double"
title = "Double"
topic = "attention"
statement = "What is twice $<n>$?"
hints = ["a", "b", "c"]
solution = "It is <answer>."
[problem.wrong]
square = "You squared <n>."
"""
CODE = """
from glassformer.theory.course import Drawn, Number

def double(draw):
    n = draw.integer(3, 99)
    return Drawn(Number(2 * n), {"n": n}, {"square": n * n})
"""


def write(folder, words=WORDS, code=CODE):
    (folder / "mine.toml").write_text(words)
    (folder / "mine.py").write_text(code)
    return folder / "mine.toml"


def test_a_teachers_problem(tmp_path):
    (problem,) = load(write(tmp_path))
    task = problem.task(5)
    n = task.drawn.values["n"]
    assert task.statement == f"What is twice ${n}$?"
    assert task.solution == f"It is {2 * n}."
    assert task.check(str(2 * n)).right
    mark = task.check(str(n * n))
    assert (mark.result, mark.mistake, mark.message) == ("wrong", "square", f"You squared {n}.")
    assert task.check("?").result == "unreadable"
    assert task.check("1000").message


def test_a_draw_depends_on_its_seed_only():
    problem = built_in()["self-weight"]
    assert [problem.task(s).reference for s in range(9)] == [problem.task(s).reference for s in range(9)]
    assert len({problem.task(s).statement for s in range(9)}) > 4


def test_a_draw_whose_mistake_gives_the_right_answer_is_replaced():
    def draw(rng):
        n = rng.integer(0, 3)
        return Drawn(Number(2 * n), {"n": n}, {"square": n * n})

    problem = Problem("p", "P", "attention", "<n>", ("", "", ""), "", {"square": "squared"}, draw)
    assert {problem.task(seed).statement for seed in range(40)} == {"1", "3"}
    never = Problem(
        "p", "P", "attention", "", ("", "", ""), "", {"same": "x"}, lambda rng: Drawn(Number(1), {}, {"same": 1})
    )
    with pytest.raises(CourseError, match="cannot be drawn"):
        never.task(0)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("[[problem", CODE, "not a TOML file"),
        (WORDS.replace('title = "Double"', ""), CODE, "lacks 'title'"),
        (WORDS.replace("title =", "tilte = 1\ntitle ="), CODE, "unknown field 'tilte'"),
        (WORDS.replace('"attention"', '"cooking"'), CODE, "topic 'cooking'"),
        (WORDS.replace('"a", "b", "c"', '"a"'), CODE, "needs 3 hints"),
        (WORDS, "def other(draw): ...", r"no function double\(\)"),
        (WORDS, "1/0", "cannot be run"),
    ],
)
def test_mistakes_of_a_teacher(tmp_path, words, code, message):
    with pytest.raises(CourseError, match=message):
        load(write(tmp_path, words, code))


def test_a_toml_file_needs_its_python_file(tmp_path):
    words = write(tmp_path)
    (tmp_path / "mine.py").unlink()
    with pytest.raises(CourseError, match=r"needs the file mine\.py"):
        load(words)


def test_values_in_statements():
    assert shown(Fraction(-1, 2)) == r"-\tfrac{1}{2}"
    assert shown([1, Fraction(1, 3)]) == r"(1, \tfrac{1}{3})"
    assert shown([[1, 2], [3, 4]]) == r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"
    assert shown(0.25) == "0.25"
