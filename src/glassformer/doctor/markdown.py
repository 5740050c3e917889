"""The report in Markdown, fit for a bug tracker: what is wrong, the evidence, the fix, and a script that shows it."""

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from glassformer.doctor.report import Diagnosis, Report, explanation
from glassformer.doctor.reproduce import Reproduction
from glassformer.doctor.reproduce.experiments import why_not


def environment(model: Any = None) -> dict[str, str]:
    """Versions of Python, torch and the package that the model's class comes from."""
    import torch

    found = {"Python": platform.python_version(), "torch": torch.__version__}
    package = type(model).__module__.partition(".")[0] if model is not None else ""
    for name in importlib.metadata.packages_distributions().get(package, [])[:1]:
        found[name] = importlib.metadata.version(name)
    return found


def to_markdown(report: Report, scripts: Sequence[Reproduction] = (), versions: Mapping[str, str] | None = None) -> str:
    """The report as one Markdown document."""
    lines = [f"# {_plain(report.verdict())}", ""]
    shown = ", ".join(f"{name} {version}" for name, version in (versions or {}).items())
    counts = report.counts
    lines += [
        f"Examined with `glass doctor`: {counts['pass']} probes passed, {counts['fail']} failed, "
        f"{counts['skip']} could not be made." + (f" {shown}." if shown else ""),
        "",
    ]
    for diagnosis in report.diagnoses:
        lines += _diagnosis(diagnosis, scripts)
    if report.notes:
        lines += [
            "<details><summary>Notes</summary>",
            "",
            *(f"* {_plain(note)}" for note in report.notes),
            "",
            "</details>",
            "",
        ]
    return "\n".join(lines)


def _diagnosis(diagnosis: Diagnosis, scripts: Sequence[Reproduction]) -> list[str]:
    where = diagnosis.where()
    lines = [f"## `{diagnosis.id}`: {diagnosis.title}", ""]
    if where:
        lines += [f"**Where:** {_plain(where)}", ""]
    lines += ["| probe | measured | explanation |", "|---|---|---|"]
    for finding in diagnosis.evidence:
        lines.append(f"| `{finding.id}` | {_cell(finding.numbers())} | {_cell(explanation(finding))} |")
    lines += ["", f"**Fix:** {_plain(diagnosis.remedy)}", ""]
    if diagnosis.consequences:
        names = ", ".join(f"`{name}`" for name in sorted({f.id for f in diagnosis.consequences}))
        lines += [f"Probably its consequences: {names}.", ""]
    script = next((s for s in scripts if s.finding in diagnosis.evidence), None)
    if script is None:
        lines += [why_not(diagnosis.id), ""]
    else:
        lines += [
            "**Reproduction** (exit code 1 if the defect shows; it was run):",
            "",
            "```python",
            script.text.rstrip(),
            "```",
            "",
        ]
    return lines


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|")


def _plain(text: str) -> str:
    """One line; what would be read as an HTML tag is escaped."""
    return " ".join(text.split()).replace("<", "&lt;")
