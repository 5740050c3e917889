"""Asking the command line as a user does."""

import json

from glassformer.cli import main


def run(capsys, *arguments):
    """(exit code, standard output, standard error)."""
    try:
        code = main([str(a) for a in arguments])
    except SystemExit as stop:
        code = stop.code or 0
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def settings(*changes):
    """A `--set` for each change to a run."""
    return [word for change in changes for word in ("--set", str(change))]


def run_json(capsys, *arguments):
    code, out, _ = run(capsys, *arguments, "--json")
    assert len(out.strip().splitlines()) == 1
    return code, json.loads(out)


def has_compiler() -> bool:
    """Whether the CPU kernels can be compiled here; False where the package `kernels` was removed."""
    try:
        from glassformer.kernels.toolchain.cxx import compiler
    except ImportError:
        return False
    return compiler() is not None
