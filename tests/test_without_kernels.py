"""Kernels are optional: a copy of the package without them works, only slower."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = "the cat sat on the mat. " * 200
TINY = {
    "model.n_layers": 1,
    "model.d_model": 16,
    "model.attention.n_heads": 2,
    "model.feedforward.d_ff": 32,
    "loop.steps": 2,
    "loop.batch": 2,
    "loop.eval_batches": 1,
    "schedule.warmup": 0,
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The source tree without src/glassformer/kernels."""
    folder = tmp_path_factory.mktemp("copy")
    ignore = shutil.ignore_patterns("kernels", "__pycache__")
    shutil.copytree(ROOT / "src" / "glassformer", folder / "src" / "glassformer", ignore=ignore)
    return folder


def run(copy: Path, *words: str, where: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(copy / "src")}
    return subprocess.run(
        [sys.executable, *words], env=environment, cwd=where or copy, capture_output=True, text=True, check=False
    )


ONE_PROCESS = """
import contextlib, importlib, io, json, pathlib, sys
source = pathlib.Path(sys.argv[1])
for path in sorted(source.rglob("*.py")):
    parts = path.relative_to(source.parent).with_suffix("").parts
    if parts[1] in ("bench", "__main__", "pytest_plugin"):  # benchmarks measure the kernels
        continue
    try:
        importlib.import_module(".".join(parts).removesuffix(".__init__"))
    except ModuleNotFoundError as error:
        if error.name.split(".")[0] == "glassformer":  # and not a package of an extra that is not installed
            raise

from glassformer.cli import main
results = []
for words in (["--max-new-tokens", "40", "--json"], ["--engine", "native"]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["sample", "ROMEO:", *words])
    results.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(results))
"""


def test_every_module_outside_bench_imports_and_sampling_is_in_torch(copy):
    done = run(copy, "-c", ONE_PROCESS, str(copy / "src" / "glassformer"))
    assert done.returncode == 0, done.stderr
    (code, out, _), (refused, _, err) = json.loads(done.stdout)
    assert code == 0
    engine = json.loads(out)["engine"]
    assert engine["engine"] == "torch"
    assert "not installed" in engine["why"]
    assert refused == 2
    assert len(err.strip().splitlines()) == 1


def glass(copy: Path, *words: str, where: Path | None = None) -> str:
    done = run(copy, "-m", "glassformer", *words, where=where)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_training_and_env_work(copy, tmp_path):
    (tmp_path / "cats.txt").write_text(TEXT)
    changes = [word for name, value in TINY.items() for word in ("--set", f"{name}={value}")]
    events = glass(copy, "train", "cats.txt", *changes, "--json", where=tmp_path)
    start = json.loads(events.splitlines()[0])
    assert not start["kernels"]
    facts = json.loads(glass(copy, "env", "--json"))
    assert facts["train"]["implementation"] == facts["sample"]["implementation"] == "torch"


@pytest.mark.slow
def test_the_suite_without_kernel_tests_is_green(copy):
    """Everything but the tests of kernels and of their benchmarks."""
    ignored = shutil.ignore_patterns("kernels", "bench", "__pycache__", "emulated_cuda", "docs")
    shutil.copytree(ROOT / "tests", copy / "tests", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md", "constraints.txt", "Makefile"):
        shutil.copy(ROOT / name, copy)
    for name in ("docs", "recipes"):
        shutil.copytree(ROOT / name, copy / name)
    leave_out = ["tests/test_architecture.py", "tests/test_cuda.py", "tests/test_without_kernels.py"]
    leave_out += ["tests/cli/test_bench.py", "tests/test_notebooks.py"]  # they need tests/bench and tests/docs
    words = [word for name in leave_out for word in ("--ignore", name)]
    done = run(copy, "-m", "pytest", "-q", "-x", *words)
    assert done.returncode == 0, done.stdout[-3000:]
