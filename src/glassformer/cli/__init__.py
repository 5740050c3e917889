"""`glass`: verbs to function calls. Parsing and printing only; torch is imported when a verb needs it.

Exit codes: 0 done, 1 a check failed, 2 the input was wrong, 130 interrupted, 141 the reader of standard output closed
it, as in `glass ... | head`. Errors a user can cause are one sentence on standard error; GLASSFORMER_DEBUG=1 shows the
traceback instead.
"""

import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import Any


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code. Without arguments it is the program: Ctrl-C is quiet from here to exit."""
    if sys.stdout is None:
        print("glass: standard output is closed: open it, or send it to /dev/null.", file=sys.stderr)
        return 2
    try:
        return _flushed(_run(arguments))
    except SystemExit as ended:  # the parser's: --help, or wrong usage
        if (code := _flushed(0)) != 0:
            return code
        raise ended from None


CLOSED = 128 + 13
"""Exit code of a program that was ended by SIGPIPE; Python ignores the signal."""


def _run(arguments: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words in (["--version"], ["version"]):
        from glassformer import __version__

        print(f"glassformer {__version__}")
        return 0
    alone = arguments is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if alone:
        signal.signal(signal.SIGINT, _leave)
    try:
        # imported here and not above: these imports take a fifth of a second, in which Ctrl-C must be quiet too
        from glassformer.cli.parse import parse

        call = parse(words)
        if alone:
            signal.signal(signal.SIGINT, _interrupt)
        return call()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _hear_nothing()
        return CLOSED
    except (ValueError, OSError) as error:
        if os.environ.get("GLASSFORMER_DEBUG"):
            raise
        print(f"glass: {_sentence(error)}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if (told_of := _memory(error)) is None or os.environ.get("GLASSFORMER_DEBUG"):
            raise
        print(f"glass: {told_of}", file=sys.stderr)
        return 2
    finally:
        if alone:
            _end()


def _leave(*_: Any) -> None:
    """Ctrl-C where nothing is left to tidy up: while verbs are imported, and after they have ended."""
    os._exit(130)


def _interrupt(number: int, frame: Any) -> None:
    """Ctrl-C while a verb runs: as Python does it, but not into the C++ of a torch half imported, which would crash."""
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    if getattr(spec, "_initializing", False):
        _leave()
    signal.default_int_handler(number, frame)


def _end() -> None:
    """From now on an interrupt, which Python would report wherever it is, only ends the process."""
    signal.signal(signal.SIGINT, _leave)


def _flushed(code: int) -> int:
    """Write out what was printed, and return the exit code; another one if that fails."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _hear_nothing()
        return CLOSED
    except OSError as error:
        _hear_nothing()
        print(f"glass: standard output cannot be written ({error.strerror}): send it elsewhere.", file=sys.stderr)
        return 2
    return code


def _hear_nothing() -> None:
    """The reader has gone (`glass ... | head`): say nothing, and keep Python from saying it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _memory(error: MemoryError | RuntimeError) -> str | None:
    """What a user reads where memory ran out; None for another error. torch has no type for it on a CPU."""
    text = str(error)
    out = isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text.lower()
    if not (out or "not enough memory" in text):
        return None
    wanted = re.search(r"tried to allocate ([\d.]+ ?\w+)", text, re.IGNORECASE)
    asked = f" ({wanted[1]} more were asked for)" if wanted else ""
    return f"there is not enough memory{asked}: ask for less at once, such as fewer rows, beams or tokens."


def _sentence(error: ValueError | OSError) -> str:
    """What a user reads; the system's own errors, which nobody foresaw, name the path and say what to do."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename} cannot be used ({error.strerror}): give another path, or fix this one."
    return " ".join(str(error).split())
