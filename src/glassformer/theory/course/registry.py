"""All problems by id, and the course as lists of items: problems and coding exercises, by source and by topic."""

import importlib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from glassformer.errors import nearest
from glassformer.theory import exercises
from glassformer.theory.claims import Erratum, coverage
from glassformer.theory.claims.registry import load_all as all_claims
from glassformer.theory.course.problem import TOPICS, CourseError, Problem, load, read
from glassformer.theory.exercises import Exercise

GROUPS = ("weights", "heads", "matrix", "positions", "probability", "counting", "architecture", "decoding", "theory",
          "circuits", "comparison")  # fmt: skip
"""Modules of problems/, each with a TOML file of the same name."""
SOURCES = ("Solution manual", "Ch. 13", "Topic 10", "Bishop 12", "CSCI 5922 PS4")
"""The five sources, as the citations in coverage.toml begin."""

Item = Problem | Exercise


@cache
def built_in() -> Mapping[str, Problem]:
    """Return the problems of the package by id."""
    found: dict[str, Problem] = {}
    for group in GROUPS:
        words = tomllib.loads((files(__package__) / "problems" / f"{group}.toml").read_text(encoding="utf-8"))
        module = importlib.import_module(f"{__package__}.problems.{group}")
        found |= {problem.id: problem for problem in read(words["problem"], module, f"problems/{group}.toml")}
    return found


@dataclass(frozen=True)
class Course:
    """The problems and exercises of a course. `folder` adds a teacher's own problems, whose Python files are run."""

    problems: Mapping[str, Problem]
    exercises: Mapping[str, Exercise]

    def find(self, id: str) -> Item:
        item = self.problems.get(id) or self.exercises.get(id)
        if item is None:
            hint = nearest(id, [*self.problems, *self.exercises], others="Some ids:", listed=[*self.problems][:8])
            raise CourseError(f"there is no problem or exercise {id!r}.{hint}")
        return item

    def topic(self, item: Item) -> str:
        """Return the topic: an exercise has that of the problems about its first claim."""
        if isinstance(item, Problem):
            return item.topic
        shared = [p.topic for claim in item.claims for p in self.problems.values() if claim in p.claims]
        return shared[0] if shared else TOPICS[-1]

    def by_topic(self) -> dict[str, list[Item]]:
        """Return the path by topic: the problems of a topic, then its coding exercises."""
        items: list[Item] = [*self.problems.values(), *self.exercises.values()]
        return {topic: [item for item in items if self.topic(item) == topic] for topic in TOPICS}

    def by_source(self) -> dict[str, list[tuple[str, list[Item]]]]:
        """Return for each source its rows in their order, each with the items that practise it."""
        found: dict[str, list[tuple[str, list[Item]]]] = {source: [] for source in SOURCES}
        for row in coverage():
            items: list[Item] = [p for p in self.problems.values() if row.cite in p.rows]
            items += [e for e in self.exercises.values() if row.cite in e.sources]
            source = next(name for name in SOURCES if row.cite.startswith(name))
            found[source].append((row.cite, items))
        return found

    def sheet(self, name: str) -> list[Item]:
        """Return the items of a source, of a topic, or of a list of ids separated by commas."""
        wanted = name.strip().lower()
        if wanted in TOPICS:
            return self.by_topic()[wanted]
        for source, rows in self.by_source().items():
            if wanted in (source.lower(), source.lower().replace(" ", "-").replace(".", "")):
                return list({item.id: item for _, items in rows for item in items}.values())
        if wanted == "own":
            return [p for p in self.problems.values() if p.id not in built_in()]
        if "," in name or name in self.problems or name in self.exercises:
            return [self.find(id.strip()) for id in name.split(",") if id.strip()]
        known = [*TOPICS, *SOURCES]
        raise CourseError(f"there is no sheet {name!r}.{nearest(name, known, others='Sheets: a list of ids, or')}")


def course(folder: Path | None = None) -> Course:
    """Return the course, with the problems of a teacher's folder if one is given."""
    problems = dict(built_in())
    for problem in _own(folder) if folder is not None else ():
        if problem.id in problems or problem.id in exercises.ALL:
            raise CourseError(f"{folder} has a problem {problem.id!r}, and this id exists already: choose another.")
        problems[problem.id] = problem
    return Course(problems, exercises.ALL)


def _own(folder: Path) -> Iterable[Problem]:
    if not folder.is_dir():
        raise CourseError(f"{folder} is not a folder: give a folder with TOML and Python files of problems.")
    words = sorted(folder.glob("*.toml"))
    if not words:
        raise CourseError(f"{folder} contains no TOML file: see the example in docs/course.md.")
    for file in words:
        yield from load(file)


def errata(item: Item) -> list[Erratum]:
    """Return the errata of the claims of an item that concern its rows, or all of them if it names no rows."""
    rows = item.rows if isinstance(item, Problem) else ()
    wanted = {id for row in coverage() if row.cite in rows for id in row.errata}
    known = all_claims()
    listed = [e for claim in item.claims if claim in known for e in known[claim].errata]
    return list({e.id: e for e in listed if not rows or e.id in wanted}.values())
