"""Parse a command line into the call of one verb, or raise one sentence about what is wrong with it.

Only the module of the requested verb is imported. An option that takes a list takes one value each time and
may be repeated, so that it never takes the words that belong to a positional argument.
"""

import contextlib
import functools
import importlib
import inspect
import io
import itertools
import os
import re
import shlex
import shutil
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO, Union, get_args, get_origin, get_type_hints

import tyro

from glassformer.cli.common import InputError
from glassformer.errors import nearest

Verb = Callable[..., int]
Call = Callable[[], int]

VERBS = {
    "tour": "training",
    "train": "training",
    "launch": "launch",
    "data": "data",
    "sample": "sample",
    "chat": "chat",
    "eval": "eval",
    "look": "look",
    "check": "theory",
    "exercise": "theory",
    "course": "course",
    "doctor": "doctor",
    "compare": "compare",
    "bench": "bench",
    "size": "size",
    "convert": "convert",
    "serve": "serve",
    "env": "env",
}
"""Each verb and the module of this package that has a function of the same name."""
DESCRIPTION = "glassformer: the Transformer you can see through. `glass help COMMAND` shows the options of one command."

_POSITIONAL = get_args(tyro.conf.Positional[int])[1]
_ARG: Any = type(tyro.conf.arg())
_ASSIGNMENT = re.compile(r"[\w.-]+=")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def parse(words: Sequence[str]) -> Call:
    """Return the call that a command line asks for. Raise InputError, or SystemExit where tyro prints the problem."""
    match list(words):
        case []:
            with contextlib.redirect_stdout(sys.stderr):
                return _overview(2)
        case ["help" | "--help" | "-h"] | ["help", "help" | "version"]:
            return _overview(0)
        case ["help", name, *_]:
            return _parse_verb(name, ["--help"])
        case [option, *_] if option.startswith("--tyro-"):
            return _all_verbs(words)
        case [option, *_] if option.startswith("-"):
            raise InputError(f"the first word must be a command, not {option}: write `glass COMMAND {option}`.")
        case [name, *rest]:
            return _parse_verb(name, rest)
    raise AssertionError("a list is empty or has a first word")


def load(name: str) -> Verb:
    """Import the module of a verb and return the verb."""
    verb: Verb = getattr(importlib.import_module(f"glassformer.cli.{VERBS[name]}"), name)
    return verb


@dataclass(frozen=True)
class Parameter:
    """One parameter of a verb, as a user writes it."""

    spellings: tuple[str, ...]
    """The options that set it, such as `--json` and `--no-json`; of a positional argument its name in the help."""
    kind: Any
    """The type of one value, without None."""
    metavar: str
    """What the help calls its value, such as DIR."""
    several: bool
    positional: bool
    default: Any
    """`inspect.Parameter.empty` if it must be given."""


def parameters(verb: Verb) -> list[Parameter]:
    """Return the parameters of a verb, in the order of its signature."""
    found = []
    hints = get_type_hints(verb, include_extras=True)
    for name, given in inspect.signature(verb).parameters.items():
        kind, *marks = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name],)
        described = [mark for mark in marks if isinstance(mark, _ARG)]
        spelled = "--" + next((mark.name for mark in described if mark.name), name).replace("_", "-")
        metavar = next((mark.metavar for mark in described if mark.metavar), None)
        aliases = [alias for mark in described for alias in mark.aliases or ()]
        several = get_origin(kind) in (tuple, list)
        kind = _without_none(get_args(kind)[0] if several else kind)
        positional = _POSITIONAL in marks
        if positional:
            spellings = (metavar or name.upper(),)
        else:
            spellings = (*aliases, spelled, *([f"--no-{spelled[2:]}"] if kind is bool else []))
        found.append(Parameter(spellings, kind, metavar or "VALUE", several, positional, given.default))
    return found


def _without_none(kind: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = (part for part in get_args(kind) if part is not type(None))
    return kind


def options(verb: Verb) -> dict[str, bool]:
    """Return every option of a verb, and whether it takes a list."""
    return {option: one.several for one in parameters(verb) if not one.positional for option in one.spellings}


def _overview(code: int) -> Call:
    """Print all verbs with their descriptions."""
    try:
        with _fitted_help():
            return _all_verbs(["--help"])
    except SystemExit:
        return lambda: code


class _Kept(io.TextIOWrapper):
    """A stream that keeps what is printed; tyro chooses colours and frames by its properties, as for the real one."""

    def __init__(self, real: TextIO) -> None:
        super().__init__(io.BytesIO(), real.encoding, newline="\n")
        self.real = real

    def isatty(self) -> bool:
        return self.real.isatty()

    def text(self) -> str:
        self.seek(0)
        return self.read()


@contextlib.contextmanager
def _fitted_help() -> Iterator[None]:
    """Wrap the help outside of its boxes: tyro wraps neither the usage line nor the description."""
    real, width = sys.stdout, shutil.get_terminal_size().columns
    kept = sys.stdout = _Kept(real)
    try:
        yield
    finally:
        sys.stdout = real
        text = kept.text().replace("{" + ",".join(VERBS) + "}", "COMMAND ...")
        if os.environ.get("NO_COLOR"):  # tyro does not read it
            text = _COLOUR.sub("", text)
        for is_prose, lines in itertools.groupby(text.splitlines(), _is_prose):
            block = "\n".join(lines)
            plain = _COLOUR.sub("", block)
            fits = not is_prose or max(map(len, plain.split("\n"))) <= width
            shown = block if fits else textwrap.fill(plain, width, break_on_hyphens=False)
            print(re.sub(r" +$", "", shown, flags=re.MULTILINE))


def _is_prose(line: str) -> bool:
    """Return True for a line of the help that is neither blank nor part of a box."""
    return not (_COLOUR.sub("", line) or " ").startswith(("│", "╭", "╰", " "))


def _all_verbs(words: Sequence[str]) -> Call:
    verbs = {name: _deferred(load(name)) for name in VERBS}
    for verb in verbs.values():
        verb.__doc__ = (verb.__doc__ or "").partition("\n\n")[0]  # the overview has one paragraph for each
    call: Call = tyro.extras.subcommand_cli_from_dict(verbs, prog="glass", description=DESCRIPTION, args=list(words))
    return call


def _parse_verb(name: str, words: Sequence[str]) -> Call:
    if name not in VERBS:
        raise InputError(
            f"{name!r} is not a command.{nearest(name, [*VERBS, 'help', 'version'], others='Commands:', listed=VERBS)}"
        )
    verb = load(name)
    known = options(verb)
    _refuse_unknown_options(name, words, known)
    lists = [option for option, several in known.items() if several]
    runs = list(_runs(words, lists))
    if runs:  # several values after one option: suggest the correct spelling before tyro reports an error
        for rewritten in _repeated(words, runs, only_assignments=_reads(name, verb, words)):
            if rewritten != list(words) and _reads(name, verb, rewritten):
                write = shlex.join(["glass", name, *rewritten])
                raise InputError(f"{runs[0][1]} takes one value at a time: write `{write}`.")
    try:
        call, left = _read(name, verb, words, quiet=True)
    except SystemExit as end:
        if end.code and (sentence := _explained(name, verb, words)):
            raise InputError(sentence) from None
        with _fitted_help():
            call, left = _read(name, verb, words)  # prints the help, and exits
    if left:
        unused = f"glass {name} has no use for {left[0]!r}: leave it out, or see `glass help {name}`."
        raise InputError(_explained(name, verb, words) or unused)
    return call


def _explained(name: str, verb: Verb, words: Sequence[str]) -> str | None:
    from glassformer.cli.usage import explain  # not needed unless there is an error

    return explain(name, parameters(verb), words)


def _refuse_unknown_options(name: str, words: Sequence[str], known: dict[str, bool]) -> None:
    for word in itertools.takewhile(lambda word: word != "--", words):
        option = word.partition("=")[0].replace("_", "-")
        if option.startswith("--") and option not in known and option not in ("--help", "--help-verbose"):
            raise InputError(f"glass {name} has no option {option}.{nearest(option, known, others='Options:')}")


def _runs(words: Sequence[str], lists: Sequence[str]) -> Iterator[tuple[int, str, list[str]]]:
    """Yield each list option that is followed by more than one word: its index, its name, and these words."""
    for at, word in enumerate(itertools.takewhile(lambda word: word != "--", words)):
        option, equals, _ = word.partition("=")
        if option.replace("_", "-") in lists and not equals:
            run = [*itertools.takewhile(lambda word: not word.startswith("-"), words[at + 1 :])]
            if len(run) > 1:
                yield at, option, run


def _repeated(
    words: Sequence[str], runs: Sequence[tuple[int, str, list[str]]], only_assignments: bool
) -> Iterator[list[str]]:
    """Yield the command lines in which an option is repeated for some of the words after it, fewest repetitions first.

    A `key=value` that follows another one is a value of the option, unless it is a file.
    """
    counts = []
    for _, _, run in runs:
        assigned = [*itertools.takewhile(lambda word: _ASSIGNMENT.match(word) and not Path(word).exists(), run)]
        fewest = max(len(assigned), 1)
        counts.append(range(fewest, (fewest if only_assignments else len(run)) + 1))
    for chosen in sorted(itertools.product(*counts), key=sum):
        made = list(words)
        for (at, option, _), count in reversed([*zip(runs, chosen, strict=True)]):
            values = made[at + 1 : at + 1 + count]
            made[at : at + 1 + count] = [word for value in values for word in (option, value)]
        yield made


def _reads(name: str, verb: Verb, words: Sequence[str]) -> bool:
    """Return True if these words are a complete command."""
    try:
        return not _read(name, verb, words, quiet=True)[1]
    except SystemExit as end:
        return end.code in (0, None)


def _read(name: str, verb: Verb, words: Sequence[str], quiet: bool = False) -> tuple[Call, list[str]]:
    """Return the call, and the words that tyro does not know."""
    # a value that has no conversion is reported on standard error whatever `console_outputs` is
    with contextlib.redirect_stderr(io.StringIO()) if quiet else contextlib.nullcontext():
        read: tuple[Call, list[str]] = tyro.cli(
            _deferred(verb),
            prog=f"glass {name}",
            args=list(words),
            return_unknown_args=True,
            console_outputs=not quiet,
            config=(tyro.conf.UseAppendAction,),
        )
    return read


def _deferred(verb: Verb) -> Callable[..., Any]:
    """Return a function with the signature of the verb that returns the call instead of making it."""

    @functools.wraps(verb)
    def deferred(**arguments: Any) -> Call:
        return functools.partial(verb, **arguments)

    return deferred
