"""`glass`: the command line. It only parses and prints; torch is imported when a verb needs it.

Exit codes: 0 done, 1 a check failed, 2 the input was wrong, 130 interrupted (143 by SIGTERM), 141 the reader of
standard output closed it, as in `glass ... | head`. Errors a user can cause are one sentence on standard error;
GLASSFORMER_DEBUG=1 shows the traceback instead.
"""

import os
import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, TextIO


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code. Without `arguments` it is the whole program, and handles Ctrl-C itself."""
    if sys.stdout is None:
        print("glass: standard output is closed: open it, or send it to /dev/null.", file=sys.stderr)
        return 2
    try:
        return _flushed(_run(arguments))
    except SystemExit as ended:  # raised by the parser for --help or wrong usage
        if (code := _flushed(0)) != 0:
            return code
        raise ended from None


def _complain(sentence: str) -> None:
    """Print an error, wrapped to the width of a terminal."""
    print(fitted(f"glass: {sentence}", sys.stderr), file=sys.stderr)


def terminal_width(stream: TextIO | None = None) -> int | None:
    """Return the columns of the terminal; None if the stream is not a terminal, and lines may have any length.

    The default stream is standard output.
    """
    return max(40, shutil.get_terminal_size().columns) if (stream or sys.stdout).isatty() else None


def fitted(text: str, stream: TextIO | None = None) -> str:
    """Return a text wrapped to the width of the terminal; unchanged if the stream is not a terminal."""
    width = terminal_width(stream)
    if width is None:
        return text
    lines: list[str] = []
    broken = False  # whether the line before was too long, so that a line of the same paragraph joins it
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        whole = f"{lines.pop()} {line}" if broken and line and not indent else line
        broken = len(whole) > width and not indent
        lines += textwrap.wrap(whole, width, subsequent_indent=indent) if len(whole) > width else [whole]
    return "\n".join(lines)


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
        # imported after the signal handler is set: the imports take 0.2 s, in which Ctrl-C must not print a traceback
        from glassformer.cli.parse import parse

        call = parse(words)
        if alone:
            signal.signal(signal.SIGINT, _interrupt)
        return call()
    except KeyboardInterrupt as interrupted:
        return 128 + getattr(interrupted, "signal", signal.SIGINT)
    except BrokenPipeError:
        _discard_output()
        return CLOSED
    except (ValueError, OSError) as error:
        if os.environ.get("GLASSFORMER_DEBUG"):
            raise
        _complain(_sentence(error))
        return 2
    except (MemoryError, RuntimeError) as error:
        if (sentence := _memory(error)) is None or os.environ.get("GLASSFORMER_DEBUG"):
            raise
        _complain(sentence)
        return 2
    finally:
        if alone:
            _end()


def _leave(*_: Any) -> None:
    """Handle Ctrl-C when no cleanup is needed: while verbs are imported, and after they have ended."""
    os._exit(130)


def _interrupt(number: int, frame: Any) -> None:
    """Handle Ctrl-C while a verb runs: raise KeyboardInterrupt, or exit at once if torch is half imported."""
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    if getattr(spec, "_initializing", False):
        _leave()
    signal.default_int_handler(number, frame)


def _end() -> None:
    """Let Ctrl-C end the process from now on, without a traceback."""
    signal.signal(signal.SIGINT, _leave)


def _flushed(code: int) -> int:
    """Flush standard output and return the exit code, or another exit code if that fails."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        return CLOSED
    except OSError as error:
        _discard_output()
        print(f"glass: standard output cannot be written ({error.strerror}): send it elsewhere.", file=sys.stderr)
        return 2
    return code


def _discard_output() -> None:
    """Discard standard output, whose reader closed it (`glass ... | head`), so that Python prints no error at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _memory(error: MemoryError | RuntimeError) -> str | None:
    """Return the message for an out-of-memory error; None for another error. torch has no type for it on a CPU."""
    text = str(error)
    out = isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text.lower()
    if not (out or "not enough memory" in text):
        return None
    wanted = re.search(r"tried to allocate ([\d.]+ ?\w+)", text, re.IGNORECASE)
    asked = f" ({wanted[1]} more were requested)" if wanted else ""
    return f"there is not enough memory{asked}: use a smaller batch, fewer beams or fewer tokens."


def _sentence(error: ValueError | OSError) -> str:
    """Return the message of an error. An error of the operating system gets its path and a remedy."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename} cannot be used ({error.strerror}): give another path, or fix this one."
    return " ".join(str(error).split())
