"""The process that calls a student's function: it says what it does, and keeps to its limits."""

import json
import os
import subprocess
import sys

import numpy as np

from glassformer.theory.exercises import runner
from glassformer.theory.exercises.grading import RUNNER


def events(tmp_path, source, cases=({"x": 2},), function="f", seconds=5):
    file, job = tmp_path / "answer.py", tmp_path / "job.json"
    file.write_text(source)
    job.write_text(
        json.dumps({"file": str(file), "function": function, "cases": cases, "seconds": seconds, "memory": 2 << 30})
    )
    ours, theirs = os.pipe()
    command = [sys.executable, "-I", str(RUNNER), str(job), str(theirs)]
    process = subprocess.Popen(command, pass_fds=(theirs,), cwd=tmp_path)
    os.close(theirs)
    with os.fdopen(ours) as out:
        told = [json.loads(line) for line in out]
    process.wait()
    return told


def test_it_tells_before_and_after_each_call(tmp_path):
    told = events(tmp_path, "def f(x):\n    print('hm')\n    return x / 1", [{"x": 2}, {"x": 3}])
    assert [event["event"] for event in told] == ["loading", "call", "answer", "call", "answer", "end"]
    assert [event["value"] for event in told if event["event"] == "answer"] == [2.0, 3.0]
    assert told[-1]["printed"] == "hm\nhm\n"


def test_a_call_that_fails_names_error_and_line_and_the_next_one_still_runs(tmp_path):
    told = events(
        tmp_path, "def f(x):\n    if x == 2:\n        raise KeyError('k')\n    return x", [{"x": 2}, {"x": 3}]
    )
    assert (told[2]["error"], told[2]["line"]) == ("KeyError", 3)
    assert told[4]["value"] == 3


def test_files_cannot_be_written(tmp_path):
    told = events(tmp_path, "def f(x):\n    with open('out.txt', 'w') as out:\n        out.write('x' * 100)")
    assert told[2]["error"] == "OSError"


def test_arrays_travel_exactly_and_changes_to_arguments_show():
    values = np.random.default_rng(0).normal(size=(2, 3))
    case = {"x": {"array": values.tolist(), "dtype": "float64", "shape": [2, 3]}}
    assert np.array_equal(runner.decode(runner.encode(values)), values)
    assert runner.call(lambda x: x.sum(), case, "") == {"value": values.sum(), "changed": []}

    def change(x):
        x += 1
        return 0

    assert runner.call(change, case, "")["changed"] == ["x"]


def test_what_is_no_number_is_named_by_its_type():
    assert runner.encode({1}) == {"type": "set"}
    assert runner.encode(np.array(["a"]))["type"].startswith("array of <U1")
    assert runner.encode([1, (2.5, None)]) == {"list": [1, {"tuple": [2.5, None]}]}
    assert runner.encode(np.float32(0.5)) == 0.5


def test_only_the_beginning_of_what_is_printed_is_kept():
    kept = runner.TruncatedOutput()
    for _ in range(100):
        kept.write("x" * 100)
    assert len(kept.text) == runner.SHOWN
