"""Run the doctor on old releases of `transformers` with known causal mask leaks, each in a temporary environment.

    python -m glassformer.bench.developer.old_releases [--releases 5.8.1 5.12.1 5.16.1 5.22.2]
        [--probe] [--keep DIR] [--json FILE]

For each release, an environment in a temporary folder shares the packages installed here (above all torch) and adds
that release with the versions that it requires. In it, `gf.diagnose` examines twenty causal classes, tiny and random,
with every attention implementation they have, without a hint of what to look for. The expected leaks are those known
of these releases; for any other release, those that a plain perturbation probe finds.

Exit code 0: the doctor names `causal_leak` first for exactly the expected subjects, and nothing for the others. 1: it
does not. 2: an environment could not be created. It needs a package index that has the releases, about 130 MB of disk
at a time, and three seconds per subject. The environments are removed afterwards, also after an interrupt.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from glassformer.bench.commands import parser
from glassformer.bench.developer.old_releases_subjects import CLASSES
from glassformer.bench.processes import Died, Process

ROOT = Path(__file__).parents[4]
RELEASES = ("5.8.1", "5.12.1", "5.16.1", "5.22.2")
MASKLESS = ("RoFormer/eager", "BigBird/eager", "RemBERT/eager", "MegatronBERT/eager")
"""As decoders these used the mask of an encoder; they have eager attention only."""
LEAKS: dict[str, frozenset[str]] = {
    "5.8.1": frozenset({"Doge/sdpa"}),
    "5.12.1": frozenset({"Doge/sdpa", *MASKLESS}),
    "5.16.1": frozenset({"Doge/sdpa", *MASKLESS}),
    "5.22.2": frozenset(),
}
"""Release -> the subjects that attend to later tokens, as reported before the doctor existed."""
SECONDS = 300.0
GRACE = 60.0
"""Seconds beyond an examination's own limit: for importing torch and a release, and for code that cannot be stopped."""


class CannotPrepareError(Exception):
    """An environment could not be created; one sentence."""


@dataclass(frozen=True)
class Row:
    """One subject of one release: what was expected, and what the worker reported."""

    release: str
    subject: str
    found: dict[str, Any]

    @property
    def expected(self) -> bool:
        """True if it should leak; for a release that is not listed, True if the plain probe finds a leak."""
        if self.release in LEAKS:
            return self.subject in LEAKS[self.release]
        return bool(self.found.get("probe", {}).get("leaks"))

    @property
    def first(self) -> str:
        """The first diagnosis, `healthy`, or `not examined`."""
        if self.found.get("error"):
            return "not examined"
        return (self.found["diagnoses"] or ["healthy"])[0]

    @property
    def agrees(self) -> bool:
        return self.first == ("causal_leak" if self.expected else "healthy")

    @property
    def evidence(self) -> str:
        """The largest leak, or the largest change that a passing causality probe measured, or the error."""
        if self.found.get("error"):
            return str(self.found["error"])
        if self.found["diagnoses"]:
            words = (self.found["leak"], self.found["where"], *self.found["diagnoses"][1:])
            return "; ".join(word for word in words if word)
        return f"earlier outputs move by {max(gap for gap, _ in self.found['causality'].values()):.2g}"

    @property
    def notes(self) -> str:
        return ", ".join(self.found.get("notes", ()))

    def to_dict(self) -> dict[str, Any]:
        name, _, attention = self.subject.partition("/")
        names = {"release": self.release, "class": name, "attention": attention, "first": self.first}
        return {**names, "expected": "causal_leak" if self.expected else "healthy", "agrees": self.agrees, **self.found}


def shared_folders() -> list[str]:
    """Return the folders of the packages of the running interpreter."""
    return list(dict.fromkeys(sysconfig.get_paths()[kind] for kind in ("purelib", "platlib")))


def prepare(folder: Path, release: str) -> Path:
    """Create an environment with `release` in `folder` unless it exists, and return the path of its interpreter.

    It can import what is installed here; pip adds only what the release needs in another version.
    """
    python, own = folder / "bin" / "python", sysconfig.get_path("purelib", "venv", {"base": str(folder)})
    if not python.exists():
        venv.create(folder, symlinks=True)
        lines = [f"import site; site.addsitedir({path!r})" for path in shared_folders()]
        (Path(own) / "shared.pth").write_text("\n".join(lines) + "\n")
    if installed(python) != release:
        limits = folder / "constraints.txt"
        limits.write_text(f"torch=={version('torch')}\n")  # never download another torch
        pip = [str(python), "-m", "pip", "install", "--quiet", "-c", str(limits), f"transformers=={release}"]
        done = subprocess.run(pip, capture_output=True, text=True, env=environment(), check=False)
        if installed(python) != release:
            last = (done.stderr.strip() or "pip printed no error").splitlines()[-1]
            raise CannotPrepareError(f"transformers {release} could not be installed: {last}")
    return python


def installed(python: Path) -> str:
    """Return the release that an environment has; empty if none."""
    code = "from importlib.metadata import version; print(version('transformers'))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, env=environment(), check=False)
    return done.stdout.strip()


def environment() -> dict[str, str]:
    """Return environment variables: this checkout's doctor, no hub, no user packages, no warnings, one thread."""
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}
    ours = {"PYTHONPATH": str(ROOT / "src"), "PYTHONNOUSERSITE": "1"}
    return {"OMP_NUM_THREADS": "1", **os.environ, **quiet, **ours}


def subjects(python: Path) -> list[str]:
    """Return CLASS/ATTENTION of every subject that this release has."""
    listing = [str(python), "-m", "glassformer.bench.developer.old_releases_subjects"]
    done = subprocess.run(listing, capture_output=True, text=True, env=environment(), cwd=ROOT, check=False)
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise CannotPrepareError(f"the release in {python.parents[4].name} does not load: {last}")
    return done.stdout.split()


def examined(command: list[str], waiting: list[str], seconds: float, grace: float = GRACE) -> Iterator[dict[str, Any]]:
    """Yield what a worker reports of each of `waiting`, in order. If it dies or hangs, only one subject is lost.

    `command` examines the subjects named after it and prints one JSON object per line.
    """
    waiting = list(waiting)
    while waiting:
        process = Process([*command, "--seconds", str(seconds), *waiting], environment(), ROOT)
        with contextlib.closing(process):
            while waiting:
                try:
                    line = process.read_line(seconds + grace)
                except Died as death:
                    yield {"subject": waiting.pop(0), "error": str(death)}
                    break
                with contextlib.suppress(ValueError):  # a release may print lines of its own
                    found = json.loads(line)
                    if isinstance(found, dict) and found.get("subject") == waiting[0]:
                        waiting.pop(0)
                        yield found


def examine(release: str, folder: Path, wanted: list[str], seconds: float) -> Iterator[Row]:
    """Examine every subject of a release whose class is `wanted` (empty: all), in an environment in `folder`."""
    python = prepare(folder, release)
    chosen = [s for s in subjects(python) if not wanted or s.partition("/")[0] in wanted]
    for found in examined([str(python), "-m", "glassformer.bench.developer.old_releases_subjects"], chosen, seconds):
        yield Row(release, found["subject"], found)


def table(rows: list[Row], probed: bool = False) -> str:
    """Return the table in Markdown."""
    head = ["release", "class", "attention", "first diagnosis", "evidence", "expected", "agrees"]
    lines = [[*head, *(["plain probe"] if probed else [])]]
    lines.append(["---"] * len(lines[0]))
    for row in rows:
        name, _, attention = row.subject.partition("/")
        expected = "causal_leak" if row.expected else "healthy"
        seen = f"{row.evidence} (note: {row.notes})" if row.notes else row.evidence
        cells = [row.release, name, attention, row.first, seen, expected, "yes" if row.agrees else "NO"]
        lines.append([*cells, *([row.found.get("probe", {}).get("text", "")] if probed else [])])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def verdict(rows: list[Row]) -> str:
    """One line a release, and what does not agree."""
    lines = []
    for release in dict.fromkeys(row.release for row in rows):
        mine = [row for row in rows if row.release == release]
        leaks = [row.subject for row in mine if row.first == "causal_leak"]
        text = f"transformers {release}: {len(mine)} subjects, {len(leaks)} leak ({', '.join(leaks) or 'none'})"
        lines.append(f"{text}, {sum(row.agrees for row in mine)} agree")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument(
        "--releases",
        nargs="+",
        default=list(RELEASES),
        type=release_number,
        metavar="X.Y.Z",
        help="Releases to examine. Default: the four listed above.",
    )
    options.add_argument(
        "--classes", nargs="+", default=[], choices=list(CLASSES), metavar="NAME", help="Only these classes."
    )
    options.add_argument("--probe", action="store_true", help="Also print the result of a plain perturbation probe.")
    options.add_argument("--keep", type=Path, metavar="DIR", help="Create the environments here, and keep them.")
    options.add_argument("--json", type=Path, metavar="FILE", help="Write all measurements to this file.")
    options.add_argument("--seconds", type=float, default=SECONDS, help="Time limit of one examination. Default: 300.")
    given = options.parse_args()
    if given.json and not given.json.parent.is_dir():
        options.error(f"there is no folder {str(given.json.parent)!r} to write {given.json.name!r} into: create it.")
    return given


def release_number(text: str) -> str:
    if not re.fullmatch(r"\d+\.\d+\.\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a release such as 5.12.1.")
    return text


def main() -> int:
    given = arguments()
    # a regular exit, so that the temporary folders are removed
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    rows: list[Row] = []
    try:
        for release in given.releases:
            with contextlib.ExitStack() as stack:
                parent = given.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="glass-releases-")))
                for row in examine(release, parent / release, given.classes, given.seconds):
                    rows.append(row)
                    print(f"{row.release} {row.subject}: {row.first}", file=sys.stderr, flush=True)
    except CannotPrepareError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted.", file=sys.stderr)
        return 130
    print(table(rows, given.probe), verdict(rows), sep="\n\n")
    if given.json:
        from glassformer.files import write_atomically

        about = {"torch": version("torch"), "rows": [row.to_dict() for row in rows]}
        write_atomically(given.json, (json.dumps(about, indent=1) + "\n").encode())
    return 0 if rows and all(row.agrees for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
