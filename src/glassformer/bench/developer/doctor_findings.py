"""Write the gallery of findings: defects of the released `transformers`, each with a script that shows it.

    python -m glassformer.bench.developer.doctor_findings [--only DEFECT ...] [--write FILE]

Each script needs torch and transformers alone. All of them are run against the installed version, and the page has what
they printed. A defect that does not show is left out of the page and named on standard error; the exit code is then 1.
Defects and scripts are in doctor_findings.toml; a test compares them with `doctor_sweep.KNOWN`.
"""

import argparse
import contextlib
import io
import json
import sys
import textwrap
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glassformer.bench.commands import in_process, parser
from glassformer.bench.developer.tiny_transformers import CHANGES, shrunk

HEAD = """\
import torch
import torch.nn.functional as F
import transformers

MODELS = {{
{models}
}}


{measure}


for name, fields in MODELS.items():
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**fields)).eval()
    torch.manual_seed(1)
    found = measure(model, torch.randint(4, 97, (2, 24)))
    print(f"{{name}}: {{found:.3g}}")
"""


@dataclass(frozen=True)
class Defect:
    """A defect of some classes, its effect in words, and how to measure it."""

    id: str
    diagnosis: str
    title: str
    classes: list[str]
    effect: str
    """What happens, and why."""
    unit: str
    """What the number is."""
    measure: str
    """A function `measure(model, tokens)`, as text."""
    least: float = 1e-6
    """The number above which the defect shows."""
    right: str = "0"
    """The number of a class without the defect."""


_WORDS = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
DEFECTS = tuple(Defect(**words) for words in tomllib.loads(_WORDS)["defect"])


@dataclass(frozen=True)
class Shown:
    """What a script measured for each class, and the script."""

    defect: Defect
    script: str
    found: dict[str, float]

    @property
    def classes(self) -> list[str]:
        """Classes for which it showed."""
        return [name for name in self.defect.classes if self.found.get(name, 0.0) > self.defect.least]

    @property
    def missing(self) -> list[str]:
        """Classes for which it did not show."""
        return [name for name in self.defect.classes if name not in self.classes]


def fields_of(name: str) -> dict[str, Any]:
    """Return the fields of a tiny config of a class that differ from its defaults."""
    import transformers

    fields = getattr(transformers, name).config_class().to_dict()
    return {k: v for k, v in shrunk(fields, CHANGES.get(name, {})).items() if fields.get(k) != v}


def script_of(defect: Defect) -> str:
    """Return a script that measures a defect in each of its classes."""
    models = []
    for name in defect.classes:
        given = ", ".join(f"{k}={v!r}" for k, v in fields_of(name).items())
        lines = textwrap.wrap(given, 100, break_long_words=False)
        models.append(f'    "{name}": dict(\n' + "\n".join(f"        {line}" for line in lines) + "\n    ),")
    measure = defect.measure.strip()
    if "F." not in measure:
        return HEAD.replace("import torch.nn.functional as F\n", "").format(models="\n".join(models), measure=measure)
    return HEAD.format(models="\n".join(models), measure=measure)


def run(defect: Defect) -> Shown:
    """Run a script as it stands in the page and read what it prints."""
    script, out = script_of(defect), io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(script, defect.id, "exec"), {"__name__": "__main__"})
    pairs = [line.rpartition(": ") for line in out.getvalue().splitlines()]
    return Shown(defect, script, {name: float(number) for name, _, number in pairs})


def page(shown: Iterable[Shown], version: str, torch_version: str) -> str:
    """Return the gallery as Markdown; classes for which a defect did not show are left out."""
    every = [one for one in shown if one.classes]
    classes = {name for one in every for name in one.classes}
    introduction = (
        f"Defects that `glass doctor` found in released classes of transformers {version}: "
        f"{sum(len(one.classes) for one in every)} in {len(classes)} classes. Each was confirmed by an experiment of "
        "its own, the script of its section, which needs torch and transformers alone. The models are tiny and random: "
        "the defects belong to the code, not to the weights of a published model."
    )
    how = (
        "The first command writes this page and runs every script, here with transformers "
        f"{version} and torch {torch_version} on a CPU. The second examines every text class of the library."
    )
    prefix = "python -m glassformer.bench.developer"
    commands = [f"{prefix}.doctor_findings --write docs/findings.md", f"{prefix}.doctor_sweep"]
    lines = ["# Findings", "", *textwrap.wrap(introduction, 120), "", *textwrap.wrap(how, 120), ""]
    lines += ["```sh", *commands, "```", ""]
    lines += ["| class | diagnosis | measured | right |", "|---|---|---|---|"]
    for one in every:
        rows = [f"| `{name}` | `{one.defect.diagnosis}` | {one.found[name]:.3g} |" for name in one.classes]
        lines += [f"{row} {one.defect.right} |" for row in rows]
    for one in every:
        lines += ["", f"## {one.defect.title}", "", *textwrap.wrap(one.defect.effect, 120), ""]
        lines += [f"Measured: {one.defect.unit}.", "", "```python", one.script.rstrip(), "```", "", "```text"]
        lines += [*(f"{name}: {one.found[name]:.3g}" for name in one.classes), "```"]
    return "\n".join(lines) + "\n"


def worker(ids: list[str]) -> int:
    """Print one JSON object per defect, and the versions first."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    print(json.dumps({"transformers": transformers.__version__, "torch": torch.__version__}), flush=True)
    for defect in DEFECTS:
        if not ids or defect.id in ids:
            one = run(defect)
            print(json.dumps({"id": defect.id, "script": one.script, "found": one.found}), flush=True)
    return 0


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--only", nargs="+", default=[], choices=[d.id for d in DEFECTS], help="Only these defects.")
    options.add_argument("--write", type=Path, metavar="FILE", help="Write the page to FILE. Default: print it.")
    options.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.worker:
        return worker(given.only)
    chosen = ["--only", *given.only] if given.only else []
    versions, *rest = in_process("glassformer.bench.developer.doctor_findings", "--worker", *chosen)
    by_id = {defect.id: defect for defect in DEFECTS}
    shown = [Shown(by_id[one["id"]], one["script"], one["found"]) for one in rest]
    text = page(shown, versions["transformers"], versions["torch"])
    if given.write is None:
        print(text, end="")
    else:
        given.write.write_text(text)
    missing = [f"{name}: {one.defect.id}" for one in shown for name in one.missing]
    for words in missing:
        print(f"does not show: {words}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
