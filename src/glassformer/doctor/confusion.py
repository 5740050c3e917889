"""`python -m glassformer.doctor.confusion`: the confusion table of docs/doctor.md, from the bug zoo of the tests.

Each planted bug is examined; the table counts planted diagnosis against the first one given. Healthy subjects are
examined too. Needs a checkout: the zoo is no part of the installed package.
"""

import argparse
import importlib
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from glassformer.doctor.causes import RANK
from glassformer.doctor.diagnose import diagnose
from glassformer.files import write_atomically

BEGIN, END = "<!-- confusion table: begin -->", "<!-- confusion table: end -->"


def zoo(name: str = "tests.bugs.zoo", attribute: str = "ZOO") -> Iterable[Any]:
    """The planted bugs, or a sentence that says where they are."""
    sys.path.insert(0, "")
    try:
        return list(getattr(importlib.import_module(name), attribute))
    except (ModuleNotFoundError, AttributeError):
        raise SystemExit("the bug zoo (tests/bugs) is not here: run this from a checkout of the repository.") from None
    finally:
        sys.path.pop(0)


def outcomes(bugs: Iterable[Any]) -> Iterator[tuple[Any, str]]:
    """Each bug with the first diagnosis given; `healthy` when there was none."""
    for bug in bugs:
        reference = bug.reference() if getattr(bug, "reference", None) else None
        report = diagnose(bug.build(), kind=bug.kind, reference=reference, expect=dict(bug.expect))
        yield bug, report.diagnoses[0].id if report.diagnoses else "healthy"


def table(results: list[tuple[Any, str]]) -> str:
    """Markdown: one line per planted diagnosis, the names given with their counts, and which bugs went elsewhere."""
    lines = ["| planted | bugs | named so | else |", "|---|---|---|---|"]
    right = 0
    for name in RANK:
        mine = [(bug, given) for bug, given in results if bug.diagnosis == name]
        if not mine:
            continue
        named = sum(given == name for _, given in mine)
        right += named
        other = Counter(given for _, given in mine if given != name)
        elsewhere = ", ".join(f"{given} ({count})" for given, count in other.items())
        lines.append(f"| {name} | {len(mine)} | {named} | {elsewhere} |")
    accepted = sum(given == bug.diagnosis or given in bug.also for bug, given in results)
    lines += [
        "",
        f"{right} of {len(results)} planted bugs are named by their own name first, {accepted} by a name that fits.",
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="the Markdown file whose table is replaced")
    choice = parser.parse_args(arguments)
    results, began = [], time.monotonic()
    for bug, given in outcomes(zoo()):
        results.append((bug, given))
        mark = "" if given == bug.diagnosis or given in bug.also else "   <--"
        print(f"{bug.id:32} {bug.diagnosis:22} {given}{mark}", file=sys.stderr, flush=True)
    text = table(results)
    print(text)
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    if choice.write is not None:
        old = choice.write.read_text(encoding="utf-8")
        start, end = old.index(BEGIN) + len(BEGIN), old.index(END)
        write_atomically(choice.write, f"{old[:start]}\n{text}\n{old[end:]}".encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
