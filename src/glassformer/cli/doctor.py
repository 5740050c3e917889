"""`glass doctor`: what is wrong with a Transformer, where, and how to fix it."""

import contextlib
import json as json_module
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import tyro

from glassformer.cli.common import Adapter, Force, InputError, Json, check_writable, option, terminal_width, wrapped
from glassformer.config.choices import ModelKind

if TYPE_CHECKING:
    from rich.table import Table

    from glassformer.doctor import Report
    from glassformer.finding import Finding

SECONDS = 600.0
Format = Literal["text", "json", "sarif", "junit", "markdown"]
TRAILING = re.compile(r"(?: |\x1b\[[0-9;]*m)+$", re.MULTILINE)
"""Blanks at the end of a line, between the codes of its colour."""
ALSO = (
    *("prefix", "alibi", "use_alibi", "rope", "use_rope", "rotary", "use_rotary", "rotary_dim", "use_sliding_window"),
    *("relative_attention_num_buckets", "scale_attn_weights", "scale_attention", "query_pre_attn_scalar", "mup"),
    *("use_mup", "scale_attn_by_inverse_layer_idx", "bos_token_id", "eos_token_id", "decoder_start_token_id"),
    *("model_type", "is_encoder_decoder"),
)
"""Names of config values, in addition to `declared.NAMES`, that probes read and that --expect can set."""


HELP = {
    "subject": "A model folder, a bundled model such as bard, a hub name, file.py:name or package.module:name (a "
    "model, or a function that builds one).",
    "kind": "Kind of the model. Default: inferred from the model and stated in the report.",
    "vocab_size": "Number of token ids. Default: taken from the model's config.",
    "expect": "A property that the model is meant to have and its config does not declare, such as sliding-window=128, "
    "prefix=16 or scale=1. Default: only what the config declares.",
    "reference": "A trusted model with the same weights, given like SUBJECT, to compare with. Default: no comparison.",
    "device": "Examine a copy of the model on this device: cpu, cuda, cuda:1 or mps. Default: where the model is.",
    "quick": "Make a part of the probes, once each, on short inputs: causality, cache, padding, attention, loss.",
    "deep": "Also train the model briefly: overfit one batch, and learn a source of known entropy.",
    "seconds": "Time limit of the whole examination, in seconds.",
    "format": "Format of what is printed. markdown: with scripts that show each defect.",
    "junit": "Write the findings as JUnit XML to this file. Default: do not.",
    "html": "Write the report with figures as HTML to this file. Default: do not.",
}


def doctor(
    subject: Annotated[tyro.conf.Positional[str], option(HELP["subject"], "SUBJECT")],
    adapter: Adapter = None,
    kind: Annotated[ModelKind | None, option(HELP["kind"], "|".join(get_args(ModelKind)))] = None,
    vocab_size: Annotated[int | None, option(HELP["vocab_size"], "INT")] = None,
    expect: Annotated[list[str], option(HELP["expect"], "KEY=VALUE")] = [],  # noqa: B006 - tyro reads it, nothing changes it
    reference: Annotated[str | None, option(HELP["reference"], "SUBJECT")] = None,
    device: Annotated[str | None, option(HELP["device"], "DEVICE")] = None,
    quick: Annotated[bool, option(HELP["quick"])] = False,
    deep: Annotated[bool, option(HELP["deep"])] = False,
    seconds: Annotated[float, option(HELP["seconds"])] = SECONDS,
    junit: Annotated[Path | None, option(HELP["junit"], "FILE")] = None,
    html: Annotated[Path | None, option(HELP["html"], "FILE")] = None,
    format: Annotated[Format, option(HELP["format"])] = "text",
    force: Force = False,
    json: Json = False,
) -> int:
    """Examine any Transformer. Exit code 0: healthy, 1: a bug was found, 2: could not be examined."""
    if not seconds > 0:
        raise InputError(f"--seconds {seconds:g} must be a positive number; the usual limit is {SECONDS:g}.")
    if vocab_size is not None and vocab_size < 2:
        raise InputError(f"--vocab-size {vocab_size} must be at least 2.")
    for named, file in (("--junit", junit), ("--html", html)):
        if file is not None:
            check_writable(named, file, force=force)
    intent = expected(expect)
    from glassformer.doctor import diagnose
    from glassformer.doctor.load import resolve
    from glassformer.doctor.subject.device import find_device

    place = None if device is None else find_device(device)
    with aside():
        model, name = resolve(subject, seconds, adapter=adapter)
        trusted = None if reference is None else resolve(reference, seconds)[0]
    asked: dict[str, Any] = {"deep": deep, "quick": quick, "seconds": seconds, "device": place}
    format = "json" if json else format
    with live(format == "text") as (tell, found), aside():
        report = diagnose(model, kind, trusted, vocab_size, intent, **asked, tell=tell, name=name, found=found)
    write(report, junit, html)
    if format == "text":
        show(report)
    else:
        with aside():
            text = rendered(report, format, model, subject, {"vocab_size": vocab_size, "expect": intent}, seconds)
        print(text)
    return 0 if report.healthy else 1 if report.examined else 2


def rendered(
    report: "Report", format: Format, model: Any, text: str, given: dict[str, Any], seconds: float = SECONDS
) -> str:
    """Return the report in a format for other tools. `text` names the model, `given` says how it was taken."""
    if format == "json":
        return json_module.dumps(report.to_dict())
    if format == "junit":
        from glassformer.doctor.junit import to_junit

        return to_junit(report).decode()
    if format == "sarif":
        from glassformer import __version__
        from glassformer.doctor.sarif import place_of, to_sarif

        return json_module.dumps(to_sarif(report, __version__, place_of(model, text)), indent=2)
    from glassformer.doctor.load import source_of
    from glassformer.doctor.markdown import environment, to_markdown
    from glassformer.doctor.reproduce import reproduce, runs

    scripts = reproduce(report, model, source_of(text, model), **given)
    return to_markdown(report, [s for s in scripts if runs(s, seconds)], environment(model))


def expected(pairs: Sequence[str]) -> dict[str, Any]:
    """Return `k=v` texts as a dictionary. Numbers and true/false become such values."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals or not value:
            raise InputError(f"--expect {pair!r} must be KEY=VALUE, such as sliding-window=128.")
        _known(key)
        found[key] = _value(value)
    return found


def _known(key: str) -> None:
    """Refuse a name that no probe reads: a misspelled one would not be checked."""
    from glassformer.doctor.subject.declared import NAMES
    from glassformer.errors import nearest

    spellings = {name for names in NAMES.values() for name in names}.union(ALSO)
    if key.replace("-", "_") not in spellings:
        hint = nearest(key.replace("-", "_"), spellings, "Known are", {*NAMES, "prefix"})
        raise InputError(f"--expect {key}: no probe reads that name.{hint}")


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Redirect file descriptor 1 to standard error, so that output of child processes and C libraries does not mix with
    the report."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


Tell = Callable[[str, int, int], None]
Found = Callable[["Finding", str], None]


@contextlib.contextmanager
def live(wanted: bool) -> Iterator[tuple[Tell | None, Found | None]]:
    """Show a table that fills as findings are made, if standard error is a terminal. It disappears at the end."""
    if not wanted or not sys.stderr.isatty():
        yield None, None
        return
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    # the current stream: while the model runs, sys.stderr is replaced to capture what it prints
    console = Console(file=sys.stderr)
    bar = Progress(TextColumn("{task.description:26}"), BarColumn(), TimeElapsedColumn(), console=console)
    task, families = bar.add_task("first calls", total=1), dict[str, list["Finding"]]()
    options: dict[str, Any] = {"redirect_stdout": False, "redirect_stderr": False}
    with Live(bar, console=console, transient=True, refresh_per_second=8, **options) as screen:

        def tell(what: str, done: int, of: int) -> None:
            bar.update(task, description=what, completed=done, total=of)

        def found(finding: "Finding", family: str) -> None:
            families.setdefault(family, []).append(finding)
            screen.update(Group(tabulated(families, "probes"), bar))

        yield tell, found


def tabulated(groups: "Mapping[str, list[Finding]]", title: str) -> "Table":
    """Return a table with a row for each group: numbers of passes, failures and skips, and the first failure."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in (title, "pass", "fail", "skip", "worst"):
        table.add_column(column, justify="left" if column in (title, "worst") else "right")
    for name, findings in groups.items():
        counts = {v: sum(str(f.verdict) == v for f in findings) for v in ("pass", "fail", "skip")}
        worst = next((f for f in findings if str(f.verdict) == "fail"), None)
        style = "red" if counts["fail"] else "dim" if not counts["pass"] else ""
        text = "" if worst is None else worst.numbers() if title == "diagnosis" else f"{worst.id} {worst.numbers()}"
        table.add_row(name, *(str(counts[v] or "") for v in ("pass", "fail", "skip")), text, style=style)
    return table


def show(report: "Report") -> None:
    """Print a table of the diagnoses that were looked for, then the verdict in words."""
    from rich.console import Console

    width = terminal_width()
    console = Console(highlight=False, width=width or 1000)
    groups: dict[str, list[Finding]] = {}
    for finding in report.findings:
        groups.setdefault(finding.id.split("/")[0], []).append(finding)
    with console.capture() as table:
        console.print(tabulated(groups, "diagnosis"))
    print(TRAILING.sub(lambda end: end.group().replace(" ", ""), table.get()))
    print(wrapped(report.text(), width))
    print(f"\n{report.seconds:.1f} s")


def write(report: "Report", junit: Path | None, html: Path | None) -> None:
    """Write the report to the files that were asked for."""
    from glassformer.files import write_atomically

    if junit is not None:
        from glassformer.doctor.junit import to_junit

        write_atomically(junit, to_junit(report))
    if html is not None:
        from glassformer.doctor.html import to_html

        write_atomically(html, to_html(report).encode())
