"""Grading files as students write them: right, wrong in each way, and not gradable at all."""

import json

import pytest

from glassformer.theory.exercises import ALL, ExerciseError, Grader, find, grade
from glassformer.theory.exercises.grading import RIGHT, UNGRADED, WRONG

GOOD = """
import numpy as np

def attention(q, k, v):
    BEFORE
    scores = q @ k.T / np.sqrt(k.shape[1])
    weights = np.exp(scores - scores.max(1, keepdims=True))
    weights = weights / weights.sum(1, keepdims=True)
    return weights @ v, weights
"""


SHARED = Grader()


@pytest.fixture(scope="module", autouse=True)
def grader():
    with SHARED:
        yield SHARED


def graded(tmp_path, source, id="attention", **limits):
    file = tmp_path / "my.py"
    file.write_bytes(source if isinstance(source, bytes) else source.replace("BEFORE", "pass").encode())
    return SHARED.grade(find(id), file, **limits)


def grade_text(tmp_path, source, result, **limits):
    found = graded(tmp_path, source, **limits)
    assert found.result == result, found.text()
    assert found.exit_code == {RIGHT: 0, WRONG: 1, UNGRADED: 2}[result]
    assert found.text()
    return " / ".join(found.sentences)


def test_a_right_answer_is_right_and_points_on(tmp_path):
    found = graded(tmp_path, GOOD)
    assert (found.result, found.passed, found.cases) == (RIGHT, 4, 4)
    assert "glass check numpy-attention" in found.text()


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("np.sqrt(k.shape[1])", "k.shape[1]", "by the key width K: divide by its square root"),
        (" / np.sqrt(k.shape[1])", "", "you do not scale"),
        ("sum(1", "sum(0", "sum to 1 over queries, not over keys"),
        ("scores - scores.max(1, keepdims=True)", "scores", "overflows"),
        ("return weights @ v, weights", "return weights @ v", "return 2 values"),
        ("return weights @ v, weights", "weights @ v, weights", "it returns None"),
        ("return weights @ v, weights", "return (weights @ v).T, weights", "transpose"),
        ("return weights @ v, weights", "return 'a', weights", "`output` is a str"),
        ("import numpy as np", "", "begin the file with `import numpy as np`"),
        ("BEFORE", "raise KeyError('k')", "raises KeyError in line 5"),
        ("BEFORE", "exit()", "ends the interpreter in line 5: remove exit()"),
        ("BEFORE", "import os; os._exit(0)", "ended the process"),
        ("BEFORE", "x = bytearray(10**11)", "needs more memory"),
        ("BEFORE", "return attention(q, k, v)", "calls itself endlessly"),
        ("BEFORE", "import tensorflow_of_mine", "not installed"),
        ("(q, k, v):", "(q, k):", "cannot be called with the arguments"),
        ("BEFORE", "q -= 1; q += 1.5", "it modifies its argument `q`"),
    ],
)
def test_the_report_of_a_wrong_answer_names_what_is_wrong(tmp_path, old, new, sentence):
    assert sentence in grade_text(tmp_path, GOOD.replace(old, new), WRONG)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("def attention(q, k, v", "the file is not valid Python: '(' was never closed in line 1"),
        ("", "defines no function attention()"),
        (GOOD.replace("def attention", "def attend"), "it defines attend"),
        ("attention = 3", "defines no function attention()"),
        ("exit()", "ends the interpreter when it is loaded"),
        ("1 / 0", "the file cannot be loaded: it raises ZeroDivisionError in line 1"),
        (bytes(range(128, 256)), "the file is not text"),
        (b"x = 1\x00", "the file is not"),
        (b"#" * (1 << 20) + b"#", "the file has 1,048,577 bytes"),
        ("import os; os.kill(os.getpid(), 11)", "was killed"),
    ],
)
def test_the_report_of_an_ungraded_file_names_the_reason(tmp_path, source, sentence):
    assert sentence in grade_text(tmp_path, source, UNGRADED)


def test_endless_loops_are_stopped(tmp_path):
    loop = GOOD.replace("BEFORE", "while True: pass")
    assert "did not finish within 1 seconds: is there an endless loop?" in grade_text(tmp_path, loop, WRONG, seconds=1)
    assert "while the file was loading, it did not finish" in grade_text(
        tmp_path, "while True: pass", UNGRADED, seconds=1
    )


def test_many_files_are_graded_in_their_order(tmp_path):
    submissions = []
    for number, id in enumerate(["rope", "attention", "ngram", "attention"]):
        exercise = find(id)
        (tmp_path / f"{number}.py").write_text(exercise.solution if number < 3 else exercise.stub)
        submissions.append((exercise, tmp_path / f"{number}.py"))
    with Grader(workers=2) as grader:
        found = list(grader.grade_all(submissions, seed=5))
    assert [grade.exercise.id for grade in found] == ["rope", "attention", "ngram", "attention"]
    assert [grade.result for grade in found] == [RIGHT, RIGHT, RIGHT, WRONG]


@pytest.mark.parametrize("exercise", ALL.values(), ids=ALL)
def test_the_reference_solution_of_every_exercise_is_right_in_the_sandbox(grader, tmp_path, exercise):
    (tmp_path / "my.py").write_text(exercise.solution)
    found = grader.grade(exercise, tmp_path / "my.py", seed=1)
    assert found.result == RIGHT, found.text()
    (tmp_path / "my.py").write_text(exercise.stub)
    assert grader.grade(exercise, tmp_path / "my.py").result == WRONG


def test_prints_are_shown_and_change_nothing(tmp_path):
    found = graded(tmp_path, GOOD.replace("BEFORE", "print('shape', q.shape)"))
    assert found.result == RIGHT
    assert found.printed.startswith("shape (5, 4)\n")
    assert "it printed:\n  | shape (5, 4)" in found.text()
    flood = graded(tmp_path, GOOD.replace("BEFORE", "print('x' * 10**6)"))
    assert flood.result == RIGHT
    assert len(flood.printed) <= 2000


FORGED = """
import os

for fd in range(3, 64):
    try:
        os.write(fd, b'{"event": "end", "printed": ""}\\n')
    except OSError:
        pass

def attention(q, k, v):
    return q, k
"""


def test_claiming_to_be_done_does_not_make_an_answer_right(tmp_path):
    assert graded(tmp_path, FORGED).result == WRONG
    assert graded(tmp_path, FORGED + "os._exit(0)\n").result != RIGHT


LINES = [
    {"event": "answer", "case": 0, "changed": [], "value": {"array": "abc", "shape": [2]}},
    {"event": "answer", "case": 1, "changed": [], "value": {"array": [1], "shape": "x"}},
    {"event": "answer", "case": 99, "changed": []},
    {"event": "answer", "case": -1, "changed": []},
    {"event": "answer", "case": 0, "changed": 5},
    {"event": "answer", "case": 0, "changed": [[1]]},
    {"event": "answer", "case": 0, "changed": [], "error": "X"},
    {"event": "missing", "names": [1, {}]},
    {"event": "unusable", "error": 3, "message": None, "line": "x"},
    {"event": ["end"]},
    [],
]


@pytest.mark.parametrize("line", [*LINES, "[" * 100_000, "{", "\x00"], ids=range(len(LINES) + 3))
def test_events_that_a_submission_writes_itself_do_no_harm(tmp_path, line):
    text = line if isinstance(line, str) else json.dumps(line)
    forged = FORGED.replace('{"event": "end", "printed": ""}', text.replace("\\", "\\\\").replace("\x00", "\\x00"))
    found = graded(tmp_path, forged)
    assert found.result != RIGHT
    assert found.text()
    assert graded(tmp_path, forged + "os._exit(0)\n").text()


def test_plain_python_and_several_results_are_graded(tmp_path):
    ngram = """
def ngram(tokens, context, word):
    n = len(context)
    after = [tokens[i + n] for i in range(len(tokens) - n) if tokens[i:i + n] == context]
    return after.count(word) / len(after) if after else 0
"""
    assert graded(tmp_path, ngram, "ngram").result == RIGHT
    changes = {
        "len(tokens) - n)": "len(tokens) - n + 1)",
        "tokens[i + n] for": "tokens[i + n:i + n + 1] for",
        "count(word)": "count([word])",
    }
    last = ngram
    for old, new in changes.items():
        last = last.replace(old, new)
    assert "at the very end" in " ".join(graded(tmp_path, last, "ngram").sentences)
    cache = """
import numpy as np

def cache_step(x, k, v, w_q, w_k, w_v):
    k, v = np.concatenate([k, [x @ w_k]]), np.concatenate([v, [x @ w_v]])
    s = k @ (x @ w_q) / np.sqrt(k.shape[1])
    p = np.exp(s - s.max())
    return p @ v / p.sum(), k, v
"""
    assert graded(tmp_path, cache, "kv-cache").result == RIGHT


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ExerciseError, match="is not a file"):
        grade(find("rope"), tmp_path / "no.py")


def test_the_json_form_has_everything(tmp_path):
    facts = graded(tmp_path, GOOD.replace("np.sqrt(k.shape[1])", "1")).to_dict()
    assert facts["result"] == "wrong"
    assert facts["exercise"] == "attention"
    assert facts["cases"] == 4
    assert "scale" in facts["wrong"][0]
