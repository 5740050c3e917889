"""Scripts for planted bugs, run in this process."""

import contextlib
import functools
import io

import pytest

from glassformer.doctor.probes import subject_of
from glassformer.doctor.report import Diagnosis, Report
from glassformer.doctor.reproduce import Reproduction, reproduce
from glassformer.finding import Finding, Verdict
from tests.bugs.zoo import by_id


def finding(id: str, **evidence) -> Finding:
    return Finding(id, Verdict.FAIL, 1.0, 1e-6, "because", "fix it", evidence)


@functools.cache
def _models(id: str):
    return by_id(id).build(), by_id(id).healthy()


def script_for(id: str, found: Finding) -> tuple[Reproduction, Reproduction]:
    """A script for a planted bug, and the same one for its sound twin."""
    bug = by_id(id)
    diagnosis = Diagnosis(found.id.split("/")[0], "title", {}, (found,), "fix it")
    report = Report("model", bug.kind, (diagnosis,), (found,))
    sick, _ = _models(id)
    made = []
    for build in ("build", "healthy"):
        source = f"from tests.bugs.zoo import by_id\n\nmodel = by_id({id!r}).{build}()"
        made += reproduce(report, sick, source, expect=dict(bug.expect))
    assert len(made) == 2, found.id
    return made[0], made[1]


def shows_in(bug: str, build: str, kind: str, probe: str, **evidence) -> bool:
    """The same for a model by its code: `build` is `package.function`, which takes the name of a bug or nothing."""
    module, _, name = build.rpartition(".")
    found = finding(probe, **evidence)
    report = Report("model", kind, (Diagnosis(probe.split("/")[0], "title", {}, (found,), "fix it"),), (found,))
    codes = []
    for given in (repr(bug), ""):
        source = f"from {module} import {name}\n\nmodel = {name}({given})"
        names: dict = {}
        exec(source, names)
        (script,) = reproduce(report, names["model"], source)
        codes.append(exit_code(script))
    return codes == [1, 0]


def exit_code(script: Reproduction) -> int:
    """Run a script in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as message, pytest.raises(SystemExit) as end:
        exec(compile(script.text, "reproduce.py", "exec"), {"__name__": "__main__"})
    assert ("no defect" in message.getvalue()) == (not end.value.code)
    return int(bool(end.value.code))


def shows(id: str, probe: str, **evidence) -> bool:
    """Whether the script shows the defect in the planted bug and not in its twin."""
    sick, well = script_for(id, finding(probe, **evidence))
    assert "glassformer" not in sick.text
    return exit_code(sick) == 1 and exit_code(well) == 0


def adapted(id: str):
    return subject_of(by_id(id).build(), kind=by_id(id).kind)
