"""The process that calls a student's function: what it reports, and how values travel."""

import json

import numpy as np
import pytest

from glassformer.theory.exercises import grading, runner
from glassformer.theory.exercises.worker import Worker


@pytest.fixture(scope="module")
def worker():
    with Worker() as held:
        yield held


def events(worker, source, cases=({"x": 2},), function="f", seconds=5):
    job = {"source": source, "function": function, "cases": cases, "seconds": seconds, "memory": 1 << 30}
    ended = worker.run(job, 2 * seconds)
    return [json.loads(line) for line in ended.output.splitlines()]


def test_it_reports_before_and_after_each_call(worker):
    found = events(worker, "def f(x):\n    print('hm')\n    return x / 1", [{"x": 2}, {"x": 3}])
    assert [event["event"] for event in found] == ["loading", "call", "answer", "call", "answer", "end"]
    assert [event["value"] for event in found if event["event"] == "answer"] == [2.0, 3.0]
    assert found[-1]["printed"] == "hm\nhm\n"
    assert {"limits", "audit"} <= set(found[0]["layers"])


def test_a_call_that_fails_names_error_and_line_and_the_next_one_still_runs(worker):
    source = "def f(x):\n    if x == 2:\n        raise KeyError('k')\n    return x"
    found = events(worker, source, [{"x": 2}, {"x": 3}])
    assert (found[2]["error"], found[2]["line"]) == ("KeyError", 3)
    assert found[4]["value"] == 3


def test_an_exception_that_cannot_be_described_is_reported(worker):
    source = "class Odd(Exception):\n    def __str__(self):\n        raise self\n\ndef f(x):\n    raise Odd"
    assert events(worker, source)[2]["error"] == "Odd"


def test_a_submission_sees_nothing_of_the_one_before(worker):
    events(worker, "import builtins\nbuiltins.secret = 'of another student'\ndef f(x):\n    return 1")
    found = events(worker, "import builtins\ndef f(x):\n    return int(hasattr(builtins, 'secret'))")
    assert found[2]["value"] == 0


def test_arrays_travel_exactly_and_changes_to_arguments_show():
    values = np.random.default_rng(0).normal(size=(2, 3))
    case = {"x": {"array": values.tolist(), "dtype": "float64", "shape": [2, 3]}}
    assert np.array_equal(runner.decode(runner.encode(values)), values)
    assert runner.call(lambda x: x.sum(), case) == {"value": values.sum(), "changed": []}

    def change(x):
        x += 1
        return 0

    assert runner.call(change, case)["changed"] == ["x"]


def test_nested_arguments_travel_too():
    held = {"w": np.arange(3.0), "layers": [{"b": np.ones((1, 2), bool)}]}
    found = runner.decode(json.loads(json.dumps(grading._encode(held))))
    assert found["w"].tolist() == [0, 1, 2]
    assert found["layers"][0]["b"].dtype == bool
    case = {"p": grading._encode(held)}
    assert runner.call(lambda p: 0, case)["changed"] == []
    assert runner.call(lambda p: p["w"].fill(0), case)["changed"] == ["p"]
    assert runner.call(lambda p: p.pop("w").size, case)["changed"] == ["p"]


def test_a_value_that_is_not_numeric_is_named_by_its_type():
    assert runner.encode({1}) == {"type": "set"}
    assert runner.encode(np.array(["a"]))["type"].startswith("array of <U1")
    assert runner.encode([1, (2.5, None)]) == {"list": [1, {"tuple": [2.5, None]}]}
    assert runner.encode(np.float32(0.5)) == 0.5


def test_only_the_beginning_of_what_is_printed_is_kept():
    kept = runner.TruncatedOutput()
    for _ in range(100):
        kept.write("x" * 100)
    assert len(kept.text) == runner.SHOWN
