"""Check a release: build wheel and sdist, install them outside the source tree, and use them.

    python -m glassformer.bench.developer.release [--python PATH ...]

`make release-check` runs it after lint, types, the site and all tests. Every Python from 3.11 on that is found on the
PATH is tried, and each that is named. Each check prints one line. Exit code 0: everything held.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
NEEDED = ("py.typed", "pretrained/bard/model.safetensors", "studio/static/index.html", "theory/claims/coverage.toml")
USES = (
    ("glass", "--help"),
    ("glass", "sample", "ROMEO:", "--max-new-tokens", "20"),
    ("glass", "size", "gpt2"),
    ("glass", "check", "permutation-equivariance"),
    ("glass", "doctor", "bard", "--quick"),
    ("glass", "look", "attention", "--text", "My lord", "--out", "attention.svg"),
)
"""Commands that work without any extra."""


def tracked_data() -> set[str]:
    """Return the files of the package in the repository that are not Python, relative to the package."""
    listed = subprocess.run(
        ["git", "ls-files", "src/glassformer"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = [line.removeprefix("src/glassformer/") for line in listed.stdout.splitlines()]
    return {file for file in files if not file.endswith(".py")}


def packed_data(wheel: Path) -> set[str]:
    """Return the files of a wheel that are not Python, relative to the package."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name.removeprefix("glassformer/") for name in archive.namelist() if name.startswith("glassformer/")]
    return {name for name in names if not name.endswith(".py")}


def problems_of(wheel: Path, sdist: Path) -> Iterator[str]:
    """Yield what is missing in the two archives, one sentence each."""
    if missing := sorted(tracked_data() - packed_data(wheel)):
        yield f"the wheel lacks {len(missing)} files of the repository, such as {missing[0]}"
    if absent := [name for name in NEEDED if name not in packed_data(wheel)]:
        yield f"the wheel lacks {', '.join(absent)}"
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    if absent := [name for name in ("pyproject.toml", "README.md", "LICENSE") if name not in inside]:
        yield f"the sdist lacks {', '.join(absent)}"
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    if f"-{version}-" not in wheel.name:
        yield f"the wheel is called {wheel.name}, but the version is {version}"
    if f"## {version}" not in (ROOT / "CHANGELOG.md").read_text():
        yield f"CHANGELOG.md has no section for version {version}"
    for file, pattern in (
        ("CITATION.cff", r"^version: (.+)$"),
        ("src/glassformer/__init__.py", r'^__version__ = "(.+)"$'),
    ):
        found = re.search(pattern, (ROOT / file).read_text(), re.MULTILINE)
        if found is None or found[1] != version:
            yield f"{file} does not say version {version}"


def build(folder: Path) -> tuple[Path, Path]:
    """Build wheel and sdist of the committed tree into a folder."""
    tree = folder / "tree"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tree)], check=True)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(tree)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (wheel,), (sdist,) = (list((folder / "dist").glob(pattern)) for pattern in ("*.whl", "*.tar.gz"))
    return wheel, sdist


def interpreters(named: Sequence[str] = ()) -> list[str]:
    """Return every supported Python on this machine: this one, those on the PATH, and the named ones."""
    found = {f"{sys.version_info.major}.{sys.version_info.minor}": sys.executable}
    for version in VERSIONS:
        path = shutil.which(f"python{version}")  # may be a shim of a version manager that runs nothing
        if path is not None and not subprocess.run([path, "--version"], capture_output=True, check=False).returncode:
            found.setdefault(version, path)
    return list(dict.fromkeys([*found.values(), *named]))


def use(python: str, package: str, folder: Path) -> Iterator[str]:
    """Install a package into a new environment and run the commands there; yield what fails."""
    folder.mkdir()
    subprocess.run([python, "-m", "venv", str(folder / "env")], check=True)
    programs = folder / "env" / "bin"
    pip = [str(programs / "python"), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
    for wanted in (["torch", "numpy"], [package]):
        done = subprocess.run([*pip, *wanted], capture_output=True, text=True, check=False)
        if done.returncode:
            yield f"{package} cannot be installed: {done.stderr.strip().splitlines()[-1]}"
            return
    outside = {"PATH": f"{programs}{os.pathsep}/usr/bin{os.pathsep}/bin", "HOME": str(folder), "MPLBACKEND": "Agg"}
    for command in USES:
        done = subprocess.run(command, cwd=folder, env=outside, capture_output=True, text=True, check=False)
        if done.returncode or not done.stdout + done.stderr:
            yield f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-300:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", default=[], metavar="PATH", help="Also try this Python.")
    given = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        wheel, sdist = build(folder)
        print(f"built {wheel.name} ({wheel.stat().st_size / 1e6:.1f} MB) and {sdist.name}")
        checks: list[tuple[str, Iterator[str]]] = [("archives", problems_of(wheel, sdist))]
        for number, python in enumerate(interpreters(given.python)):
            for name, package in (
                ("minimal", str(wheel)),
                ("studio,theory,hub,export", f"{wheel}[studio,theory,hub,export]"),
            ):
                checks.append((f"{python}, {name}", use(python, package, folder / f"{number}-{name[:7]}")))
        checks.append((f"{sys.executable}, sdist", use(sys.executable, str(sdist), folder / "sdist")))
        for name, found in checks:
            problems = list(found)
            failed += bool(problems)
            print(f"{'failed' if problems else 'passed'}  {name}", *problems, sep="\n        ", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
