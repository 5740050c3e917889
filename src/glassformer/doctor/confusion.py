"""`python -m glassformer.doctor.confusion`: the confusion table of docs/doctor.md, from the planted bugs of the tests.

    python -m glassformer.doctor.confusion --results FILE --part 1/6     # examine a sixth of the bugs
    python -m glassformer.doctor.confusion --results FILE --write docs/doctor.md

Each planted bug is examined; the table counts planted diagnosis against the first one given. Results are appended to
FILE, one JSON object per line, and a bug that has a result there is not examined again: a run that was stopped goes on
where it was. Needs a checkout: the planted bugs are no part of the installed package.
"""

import argparse
import importlib
import json
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


def zoo(
    names: Iterable[tuple[str, str]] = (("tests.bugs.zoo", "ZOO"), ("tests.bugs.styles.variants", "VARIANTS")),
) -> list[Any]:
    """The planted bugs and their variants in other styles, or a sentence that says where they are."""
    sys.path.insert(0, "")
    try:
        return [bug for name, attribute in names for bug in getattr(importlib.import_module(name), attribute)]
    except (ModuleNotFoundError, AttributeError):
        raise SystemExit("the bug zoo (tests/bugs) is not here: run this from a checkout of the repository.") from None
    finally:
        sys.path.pop(0)


def outcomes(bugs: Iterable[Any]) -> Iterator[tuple[Any, str]]:
    """Each bug with the first diagnosis given; `healthy` when there was none."""
    for bug in bugs:
        reference = bug.reference() if getattr(bug, "reference", None) else None
        expect = dict(getattr(bug, "expect", {}))
        report = diagnose(bug.build(), kind=bug.kind, reference=reference, expect=expect)
        yield bug, report.diagnoses[0].id if report.diagnoses else "healthy"


def also(bug: Any) -> tuple[str, ...]:
    """Names that fit a bug as well as its own."""
    return tuple(getattr(bug, "also", ()))


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
    accepted = sum(given == bug.diagnosis or given in also(bug) for bug, given in results)
    lines += [
        "",
        f"{right} of {len(results)} planted bugs are named by their own name first, {accepted} by a name that fits.",
    ]
    return "\n".join(lines)


def part_of(bugs: list[Any], part: str) -> list[Any]:
    """The bugs of part K of N, written K/N: every N-th, so that each part takes about as long."""
    first, _, count = part.partition("/")
    if not (first.isdigit() and count.isdigit() and 1 <= int(first) <= int(count)):
        raise SystemExit(f"--part {part} is not K/N with K from 1 to N: use, for example, 1/6.")
    return bugs[int(first) - 1 :: int(count)]


def read_results(path: Path | None) -> dict[str, str]:
    """Bug -> the diagnosis given, from a file of results."""
    if path is None or not path.exists():
        return {}
    return {found["bug"]: found["given"] for found in map(json.loads, path.read_text(encoding="utf-8").splitlines())}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE", help="Replace the table in this Markdown file.")
    parser.add_argument("--results", type=Path, metavar="FILE", help="Read and append results, one JSON per line.")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="Examine part K of N. Default: all bugs.")
    choice = parser.parse_args(arguments)
    bugs, known, began = zoo(), read_results(choice.results), time.monotonic()
    for bug, given in outcomes(bug for bug in part_of(bugs, choice.part) if bug.id not in known):
        known[bug.id] = given
        mark = "" if given == bug.diagnosis or given in also(bug) else "   <--"
        print(f"{bug.id:32} {bug.diagnosis:22} {given}{mark}", file=sys.stderr, flush=True)
        if choice.results is not None:
            with choice.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"bug": bug.id, "given": given}) + "\n")
    text = table([(bug, known[bug.id]) for bug in bugs if bug.id in known])
    print(text)
    missing = sum(bug.id not in known for bug in bugs)
    print(f"{time.monotonic() - began:.0f} s; {missing} of {len(bugs)} bugs have no result", file=sys.stderr)
    if choice.write is not None and missing:
        raise SystemExit(f"{missing} bugs have no result: examine the other parts before writing the table.")
    if choice.write is not None:
        old = choice.write.read_text(encoding="utf-8")
        start, end = old.index(BEGIN) + len(BEGIN), old.index(END)
        write_atomically(choice.write, f"{old[:start]}\n{text}\n{old[end:]}".encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
