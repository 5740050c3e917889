"""`glass`: verbs to function calls. Parsing and printing only; torch is imported when a verb needs it.

Exit codes: 0 done, 1 a check failed, 2 the input was wrong. Errors a user can cause are one sentence on standard error;
GLASSFORMER_DEBUG=1 shows the traceback instead.
"""

import os
import sys
from collections.abc import Callable, Sequence

import tyro

from glassformer.cli import bench, compare, doctor, look, models, serve, theory, training

VERBS: dict[str, Callable[..., int]] = {
    "tour": training.tour,
    "train": training.train,
    "sample": models.sample,
    "look": look.look,
    "check": theory.check,
    "exercise": theory.exercise,
    "doctor": doctor.doctor,
    "compare": compare.compare,
    "bench": bench.bench,
    "size": models.size,
    "convert": models.convert,
    "serve": serve.serve,
    "env": models.env,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb. Returns the exit code."""
    if list(sys.argv[1:] if arguments is None else arguments) == ["--version"]:
        from glassformer import __version__

        print(f"glassformer {__version__}")
        return 0
    try:
        return tyro.extras.subcommand_cli_from_dict(
            VERBS,
            prog="glass",
            description="glassformer: the Transformer you can see through.",
            args=arguments,
        )
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # the reader has gone (`glass ... | head`): say nothing, and keep Python from saying it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        if os.environ.get("GLASSFORMER_DEBUG"):
            raise
        print(f"glass: {_sentence(error)}", file=sys.stderr)
        return 2


def _sentence(error: ValueError | OSError) -> str:
    """What a user reads; the system's own errors, which nobody foresaw, name the path and say what to do."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename} cannot be used ({error.strerror}): give another path, or mend this one."
    return " ".join(str(error).split())
