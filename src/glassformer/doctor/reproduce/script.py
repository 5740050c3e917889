"""Put a reproduction together, and run it to see whether it shows the defect."""

import contextlib
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glassformer.doctor.causes import name_of
from glassformer.doctor.report import TITLES, Diagnosis, Report
from glassformer.doctor.reproduce.calls import Calls
from glassformer.doctor.reproduce.experiment import Experiment
from glassformer.doctor.reproduce.experiments import experiment_for
from glassformer.doctor.subject.adapt import subject_of
from glassformer.doctor.subject.isolate import quiet
from glassformer.doctor.subject.subject import Subject
from glassformer.finding import Finding

SECONDS = 300.0


@dataclass(frozen=True)
class Reproduction:
    """A script for one finding. Exit code 1: the defect shows, 0: it does not."""

    finding: Finding
    text: str


def reproduce(report: Report, model: Any, source: str, **given: Any) -> list[Reproduction]:
    """Return a script for each diagnosis of a report that an experiment from outside can show.

    `source` is Python code that defines `model`, such as "from my_package import build" and "model = build()". `given`
    are the arguments of `diagnose` that say how the model is taken: `kind`, `vocab_size`, `expect`.
    """
    if not report.diagnoses:
        return []
    with quiet():
        subject = subject_of(model, **{"kind": report.kind, **given})
        found = [_one(subject, diagnosis, source) for diagnosis in report.diagnoses]
    return [r for r in found if r is not None]


def _one(subject: Subject, diagnosis: Diagnosis, source: str) -> Reproduction | None:
    """The first finding of a diagnosis for which a script can be written."""
    for finding in diagnosis.evidence:
        write = experiment_for(finding.id)
        if write is None:
            continue
        with contextlib.suppress(Exception), subject.isolated(_warmth(finding)) as isolated:
            calls = Calls(isolated)
            body = write(Experiment(isolated, finding, calls))
            return Reproduction(finding, _script(isolated, finding, source, calls, body))
    return None


def _warmth(finding: Finding) -> float:
    weights = str(finding.evidence.get("weights", "as given"))
    return float(weights.split("x ")[1]) if "x " in weights else 1.0


def _script(subject: Subject, finding: Finding, source: str, calls: Calls, body: list[str]) -> str:
    """The parts of a script in their order: imports, the model, tokens, calls, the experiment."""
    own = source.strip().splitlines()
    # a path that the source sets has to be set before its imports
    first = [] if "sys.path" in source else [line for line in own if line.startswith(IMPORTS)]
    imports = [line for line in body if line.startswith(IMPORTS)]
    used = "\n".join(body)
    standard = {"import sys", *(line for line in imports if line in STANDARD)}
    standard |= {"import math"} if "math." in used else set()
    cached = calls.cached() if "cached(" in used else ""
    if cached is None:
        raise LookupError("its cache is not returned in a known way")
    numbers = f": {finding.numbers()}" if finding.numbers() else ""
    sections = [
        HEAD.format(title=TITLES[name_of(finding)], probe=finding.id, numbers=numbers),
        "\n".join(sorted(standard)),
        "\n".join(["import torch", *(line for line in imports if line not in STANDARD)]),
        "\n".join(first),
        "\n".join(_model(subject, finding, [line for line in own if line and line not in first])),
        "\n" + DRAW,
        "\n" + calls.logits() if "logits(" in used else "",
        "\n" + cached if cached else "",
        "\n" + "\n".join(line for line in body if line not in imports).strip(),
    ]
    return "\n\n".join(s for s in sections if s) + END


IMPORTS = ("import ", "from ")
STANDARD = ("import copy",)
HEAD = '''"""{title}.

glass doctor found it with the probe {probe}{numbers}.
Exit code 1: the defect shows, 0: it does not.
"""'''
DRAW = """def draw(rows, length, seed):
    generator = torch.Generator().manual_seed(seed)
    return IDS[torch.randint(0, len(IDS), (rows, length), generator=generator)]"""
END = """
defect = not measured <= bound
print(f"measured {measured:.4g}, at most {bound:.4g} is right: {'defect' if defect else 'no defect'}")
sys.exit(defect)
"""


def _model(subject: Subject, finding: Finding, source: list[str]) -> list[str]:
    """Lines that build the model in evaluation mode, with larger matrices where the finding needs them, and its ids."""
    warm = _warmth(finding)
    larger = [
        "with torch.no_grad():  # attention of fresh weights is almost uniform and hides the defect",
        "    for p in model.parameters():",
        f"        p.mul_({warm:g}) if p.dim() > 1 else None",
    ]
    special = {i for name, i in subject.facts.raw.items() if name.endswith("token_id") and type(i) is int}
    avoid = tuple(sorted(i for i in special | {subject.pad} if i is not None and 0 <= i < subject.vocab_size))
    return [
        "torch.manual_seed(0)",
        *source,
        *(["model.eval()"] if subject.module is not None else []),
        *(larger if warm != 1.0 else []),
        f"V = {subject.vocab_size}",
        f"IDS = torch.tensor([i for i in range(V) if i not in {avoid}])" if avoid else "IDS = torch.arange(V)",
    ]


def runs(reproduction: Reproduction, seconds: float = SECONDS, folder: Path | None = None) -> bool:
    """Run a script in a process of its own; return whether it shows the defect."""
    with tempfile.TemporaryDirectory() as made:
        file = Path(made) / "reproduce.py"
        file.write_text(reproduction.text, encoding="utf-8")
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                [sys.executable, str(file)], cwd=folder, capture_output=True, text=True, timeout=seconds, check=False
            )
            return done.returncode == 1 and done.stdout.rstrip().endswith("defect") and "no defect" not in done.stdout
    return False
