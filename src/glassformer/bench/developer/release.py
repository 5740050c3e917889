"""Check a release: build wheel and sdist, install them outside the source tree, and use them.

    python -m glassformer.bench.developer.release [--python PATH ...]

`make release-check` runs it after lint, types, the site and all tests. Every Python from 3.11 on that is found on the
PATH or in the folder of pyenv is tried, and each that is named. Each check prints one line. Exit code 0: everything
held. One environment exists at a time: with the CUDA build of torch it takes 7 GB.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from glassformer.bench.commands import parser

ROOT = Path(__file__).resolve().parents[4]
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
NEEDED = ("py.typed", "pretrained/bard/model.safetensors", "studio/static/index.html", "theory/claims/coverage.toml")
EXTRAS = "studio,theory,hub,data,export,tokenizers"
USES = (
    ("glass", "--help"),
    ("glass", "sample", "ROMEO:", "--max-new-tokens", "20"),
    ("glass", "size", "gpt2"),
    ("glass", "check", "permutation-equivariance"),
    ("glass", "doctor", "bard", "--quick"),
    ("glass", "look", "attention", "--text", "My lord", "--out", "attention.svg"),
    ("glass", "train", "mytext.txt", "--out", "run", "--set", "loop.steps=20", "--set", "loop.eval_batches=2"),
    ("glass", "sample", "--model", "run/best", "The", "--max-new-tokens", "20"),
)
"""Commands that work without any extra, in this order."""
EXTRA_USES = (
    ("glass", "convert", "bard", "bard.gguf", "--to", "gguf", "--quant", "q8_0"),
    ("glass", "convert", "bard", "bard-onnx", "--to", "onnx"),
    ("glass", "sample", "--model", "bard.gguf", "ROMEO:", "--max-new-tokens", "20"),
)
"""Commands that need one of the extras."""


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
    """Return every supported Python on this machine: this one, those on the PATH or of pyenv, and the named ones."""
    found = {f"{sys.version_info.major}.{sys.version_info.minor}": sys.executable}
    managed = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in VERSIONS:
        paths = [shutil.which(f"python{version}"), *sorted(managed.glob(f"{version}.*/bin/python{version}"))]
        for path in map(str, filter(None, paths)):
            # a shim of a version manager may run nothing
            if not subprocess.run([path, "--version"], capture_output=True, check=False).returncode:
                found.setdefault(version, path)
    return list(dict.fromkeys([*found.values(), *named]))


def run(commands: Sequence[Sequence[str]], folder: Path, variables: Mapping[str, str]) -> Iterator[str]:
    """Run commands in a folder; yield what fails."""
    for command in commands:
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
        if done.returncode or not done.stdout + done.stderr:
            yield f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-300:]}"
        if "Traceback" in done.stderr or "Warning" in done.stderr:
            yield f"{' '.join(command)} printed a warning: {done.stderr.strip()[-300:]}"


def ask_server(folder: Path, variables: Mapping[str, str]) -> Iterator[str]:
    """Start `glass serve`, open the page and request a completion as an OpenAI client does; yield what fails."""
    command = ["glass", "serve", "--port", "0", "--no-open", "--folder", str(folder / "studio")]
    log = folder / "serve.log"
    with (
        log.open("w") as output,
        subprocess.Popen(command, cwd=folder, env=variables, stdout=output, stderr=output) as server,
    ):
        try:
            deadline = time.monotonic() + 120
            while not (found := re.search(r"http://[\d.]+:\d+", log.read_text())):
                if server.poll() is not None or time.monotonic() > deadline:
                    yield f"glass serve does not answer: {log.read_text().strip()[-300:]}"
                    return
                time.sleep(0.2)
            with urllib.request.urlopen(found[0], timeout=60) as page:
                if b"<html" not in page.read():
                    yield "glass serve sends no page"
            body = json.dumps({"model": "bard", "prompt": "ROMEO:", "max_tokens": 8}).encode()
            request = urllib.request.Request(f"{found[0]}/v1/completions", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=120) as answer:
                if not json.load(answer)["choices"][0]["text"]:
                    yield "glass serve completes nothing"
        except (OSError, KeyError, ValueError) as error:
            yield f"glass serve: {type(error).__name__}: {error}"
        finally:
            server.terminate()


class Environment:
    """A new virtual environment outside the tree, in which packages are installed and used."""

    def __init__(self, python: str, folder: Path):
        folder.mkdir()
        self.folder, self.programs = folder, folder / "env" / "bin"
        subprocess.run([python, "-m", "venv", str(folder / "env")], check=True)
        self.variables = {
            "PATH": f"{self.programs}{os.pathsep}/usr/bin{os.pathsep}/bin",
            "HOME": str(folder),
            "MPLBACKEND": "Agg",
        }
        (folder / "mytext.txt").write_text((ROOT / "CONTRIBUTING.md").read_text())

    def install(self, *packages: str) -> Iterator[str]:
        """Install packages, torch first as in the README; yield why it failed."""
        pip = [str(self.programs / "python"), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
        for wanted in (["torch", "numpy"], packages):
            done = subprocess.run([*pip, *wanted], capture_output=True, text=True, check=False)
            if done.returncode:
                yield f"{' '.join(wanted)} cannot be installed: {(done.stderr.strip() or '-').splitlines()[-1]}"
                return

    def use(self, package: str, *, extras: bool = False) -> Iterator[str]:
        """Install a package and run the commands; yield what fails."""
        if problems := list(self.install(f"{package}[{EXTRAS}]" if extras else package)):
            yield from problems
            return
        here = Path(tempfile.mkdtemp(dir=self.folder))
        shutil.copy(self.folder / "mytext.txt", here)
        yield from run([*USES, *EXTRA_USES] if extras else USES, here, self.variables)
        if extras:
            yield from ask_server(here, self.variables)


def checks(wheel: Path, sdist: Path, named: Sequence[str], folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each check with what failed; each environment is deleted before the next one is made."""
    yield "archives", list(problems_of(wheel, sdist))
    for number, python in enumerate(interpreters(named)):
        environment = Environment(python, folder / str(number))
        yield f"{python}, without extras", list(environment.use(str(wheel)))
        yield f"{python}, {EXTRAS}", list(environment.use(str(wheel), extras=True))
        shutil.rmtree(environment.folder)
    yield f"{sys.executable}, sdist", list(Environment(sys.executable, folder / "sdist").use(str(sdist)))


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--python", action="append", default=[], metavar="PATH", help="Also try this Python.")
    given = options.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        wheel, sdist = build(folder)
        print(f"built {wheel.name} ({wheel.stat().st_size / 1e6:.1f} MB) and {sdist.name}")
        for name, problems in checks(wheel, sdist, given.python, folder):
            failed += bool(problems)
            print(f"{'failed' if problems else 'passed'}  {name}", *problems, sep="\n        ", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
