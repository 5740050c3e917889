"""Follow a page of the documentation literally: every block in its order, in one folder.

    python -m tests.docs.walk docs/tutorials/find_a_bug.md [--programs FOLDER_OF_GLASS] [--folder EMPTY_FOLDER]

A Python block runs in the same interpreter as the ones before it. A block that the text before it asks to save ("Save
this as `x.py`") is written to that file; it runs too if it is Python. A shell block is run line by line.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.docs.blocks import ROOT, Block, blocks, shell_lines

LOOP = """
import sys, traceback
names = {"__name__": "__main__"}
for line in sys.stdin:
    path = line.rstrip()
    try:
        exec(compile(open(path).read(), path, "exec"), names)
        print("END 0", flush=True)
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        print("END 1", flush=True)
"""
"""The interpreter that executes one file after another."""
NOT_HERE = re.compile(r"\b(cuda|DIR|PATH|MODEL|RUN\.toml)\b|^glass (bench|serve)\b")
"""Commands with placeholders, for a GPU, or that run for minutes or without end."""


@dataclass(frozen=True)
class Step:
    """What one command or Python block did."""

    line: int
    command: str
    code: int
    output: str

    @property
    def works(self) -> bool:
        """Exit code 1 is a result, such as a bug that was found."""
        return self.code in (0, 1) and "Traceback" not in self.output


def saved_as(text: str, block: Block) -> str | None:
    """Return the file that the text before a block asks to save it to."""
    before = text.splitlines()[: block.line - 1]
    found = re.search(r"[Ss]ave\s+(?:this|it|them)\s+as\s+`([\w.-]+)`[^`]*$", "\n".join(before[-4:]))
    return found[1] if found else None


def follow(page: Path, folder: Path, variables: Mapping[str, str], training: str = "") -> Iterator[Step]:
    """Run the blocks of a page in a folder. `variables` is the environment; its PATH has `glass` and `python`.

    `training` is added to commands that begin a training run, to make it short.
    """
    text = page.read_text(encoding="utf-8")
    with subprocess.Popen(
        ["python", "-u", "-c", LOOP],
        cwd=folder,
        env={**variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as python:
        for number, block in enumerate(blocks(text)):
            file = saved_as(text, block)
            if file is not None:
                (folder / file).write_text(block.text)
            if block.language == "sh":
                yield from _shell(block, folder, variables, training)
            elif block.language == "python":
                yield _python(block, number, folder, python)


def _shell(block: Block, folder: Path, variables: Mapping[str, str], training: str) -> Iterator[Step]:
    for written, number in shell_lines(block):
        line = written.partition(" # ")[0].strip()
        if not line or NOT_HERE.search(line):
            continue
        if line.startswith("glass train") and "--resume" not in line and "--show" not in line:
            line = f"{line} {training}".strip()
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=folder,
            env={**variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        yield Step(number, line, done.returncode, done.stdout)


def _python(block: Block, number: int, folder: Path, python: "subprocess.Popen[str]") -> Step:
    assert python.stdin is not None
    assert python.stdout is not None
    file = folder / f".block{number}.py"
    file.write_text(block.text)
    python.stdin.write(f"{file}\n")
    python.stdin.flush()
    lines: list[str] = []
    for line in python.stdout:
        if line.startswith("END "):
            return Step(block.line, "python", int(line[4:]), "".join(lines))
        lines.append(line)
    return Step(block.line, "python", python.wait(), "".join(lines))


def environment(programs: Path, source: Path | None = None) -> dict[str, str]:
    """Return the environment of a reader, whose `glass` is in `programs`; with `source`, that of this tree."""
    kept = {name: os.environ[name] for name in ("HOME", "GLASSFORMER_DATA", "TMPDIR") if name in os.environ}
    path = os.pathsep.join([str(programs), "/usr/bin", "/bin"])
    return {**kept, "PATH": path, "MPLBACKEND": "Agg"} | ({"PYTHONPATH": str(source)} if source else {})


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--programs", type=Path, help="Folder with glass and python. Default: this one, this tree.")
    parser.add_argument("--folder", type=Path, help="Folder to work in. Default: a new one for each page.")
    parser.add_argument("--training", default="", help="Options to add to each training run, to make it short.")
    given = parser.parse_args(words)
    failed = 0
    source = ROOT / "src" if given.programs is None else None
    variables = environment(given.programs or Path(sys.executable).parent, source)
    for page in given.pages:
        with tempfile.TemporaryDirectory() as temporary:
            for step in follow(page, given.folder or Path(temporary), variables, given.training):
                failed += not step.works
                print(f"{page}:{step.line}: {step.command}\n{step.output}[{step.code}]", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
