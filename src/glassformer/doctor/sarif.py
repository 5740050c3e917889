"""The report in SARIF 2.1.0, the format that code-scanning services read: one result per diagnosis."""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from glassformer.doctor.report import Diagnosis, Report
from glassformer.finding import Finding, Verdict

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


@dataclass(frozen=True)
class Place:
    """A line of a source file. `uri` is relative, so that a report says nothing about the machine that wrote it."""

    uri: str
    line: int = 1
    name: str = ""
    last_line: int | None = None


def place_of(model: Any, text: str = "") -> Place | None:
    """Where the class or function of a model is written; else the file that `text` names ("file.py:name")."""
    thing = model if inspect.isfunction(model) or inspect.isclass(model) else type(model)
    file, line = Path(text.rpartition(":")[0]), 1
    last: int | None = None
    try:
        found = Path(inspect.getsourcefile(thing) or "")
        lines, line = inspect.getsourcelines(thing)
        last = line + len(lines) - 1
    except (OSError, TypeError):
        found = file
    if not _below(found) and file.suffix == ".py" and file.is_file():
        found, line, last = file, 1, None
    if not found.is_file():
        return None
    return Place(_uri(found, getattr(thing, "__module__", "")), max(line, 1), getattr(thing, "__qualname__", ""), last)


def _below(file: Path) -> bool:
    return file.resolve().is_relative_to(Path.cwd())


def _uri(file: Path, module: str) -> str:
    """Relative to the working directory if the file is below it, else to the folder that holds its package."""
    if _below(file):
        return quote(file.resolve().relative_to(Path.cwd()).as_posix())
    names = module.split(".")
    if file.stem == "__init__":
        names.append("__init__")
    tail = file.resolve().with_suffix("").parts[-len(names) :]
    return quote("/".join((*tail[:-1], file.name)) if list(tail) == names else file.name)


def to_sarif(report: Report, version: str, place: Place | None = None) -> dict[str, Any]:
    """The report as a dictionary for JSON. A healthy model has no results; probes that were not made are notes."""
    rules = [
        {
            "id": diagnosis.id,
            "shortDescription": {"text": diagnosis.title},
            "fullDescription": {"text": diagnosis.title},
            "help": {"text": diagnosis.remedy or diagnosis.title},
            "defaultConfiguration": {"level": "error"},
        }
        for diagnosis in report.diagnoses
    ]
    driver = {"name": "glass doctor", "version": version, "rules": rules}
    notes = [_note(f) for f in report.findings if f.verdict is Verdict.SKIP]
    if not report.examined:
        notes.insert(0, {"level": "error", "message": {"text": report.verdict()}})
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "invocations": [{"executionSuccessful": report.examined, "toolExecutionNotifications": notes}],
        "results": [_result(report, i, d, place) for i, d in enumerate(report.diagnoses)],
        "properties": {"subject": report.subject, "kind": report.kind, "counts": report.counts},
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _note(finding: Finding) -> dict[str, Any]:
    """A notification: what was found and is no bug, or why a probe was not made."""
    known = finding.evidence.get("explained")
    text = f"{finding.id} {'(found, not a bug)' if known else 'was not examined'}: {finding.why}"
    return {"level": "note", "message": {"text": text}, "descriptor": {"id": finding.id}}


def _result(report: Report, index: int, diagnosis: Diagnosis, place: Place | None) -> dict[str, Any]:
    location: dict[str, Any] = {}
    module, layer = diagnosis.location.get("module"), diagnosis.location.get("layer")
    where = str(module) if module is not None else f"layer {layer}" if layer is not None else ""
    name = f"{place.name if place else report.subject}{f' ({where})' if where else ''}"
    location["logicalLocations"] = [{"fullyQualifiedName": name}]
    if place is not None:
        region = {"startLine": place.line, "endLine": max(place.line, place.last_line or 0)}
        location["physicalLocation"] = {"artifactLocation": {"uri": place.uri}, "region": region}
    return {
        "ruleId": diagnosis.id,
        "ruleIndex": index,
        "level": "error",
        "message": {"text": diagnosis.text()},
        "locations": [location],
        "partialFingerprints": {"subjectAndDiagnosis/v1": f"{report.subject}/{diagnosis.id}"},
        "properties": diagnosis.to_dict(),
    }
