"""The type of a claim: a statement with sources, derivation, errata, a check that can fail, and a negative control.

The texts of a claim are in a TOML file (`claims/CHAPTER/ID.toml`). The check and the figure are in the Python module
that the file names, in the same folder:

    @claim("rope-relative")
    def rope_relative(lab: Lab) -> Iterator[Finding]:
        yield lab.exact("score = q^T R_(n-m) k", sympy.simplify(difference) == 0)

    @figure("rope-relative", "Scores by offset", height=3.0)
    def draw(lab: Lab, fig: Figure) -> None:
        ax = fig.canvas.subplots()

A check yields one Finding per piece of evidence. Its `why`, the reason for its bound, is in the table `[evidence]` of
the TOML file under its id. `<name>` in such a key stands for any text, and may be used in the sentence:

    "<pairing>: Toeplitz" = "an angle p theta is rounded by about p u"

If `lab.broken` is set, a check examines the same statement with its hypothesis violated as `control` describes, and at
least one Finding must then fail: a check that cannot fail proves nothing. An erratum contains a runnable example that
sets `holds`: whether the source's statement holds there. It must not.
"""

import enum
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from glassformer.errors import install
from glassformer.finding import Finding, Verdict

if TYPE_CHECKING:
    import numpy as np
    import torch

    from glassformer.lens.figure import Figure

Check = Callable[["Lab"], Iterator[Finding]]
Draw = Callable[["Lab"], "Figure"]

ERRATUM = "erratum"
"""Kind of a Finding about an error in a source; it is not evidence for the statement itself."""

PLACEHOLDER = re.compile(r"<([a-z_]\w*)>")
"""In a key of `[evidence]`: any text. In its sentence: that text, or the value of that name in the Finding."""
CHECKS: dict[str, Check] = {}
FIGURES: dict[str, Draw] = {}


class Kind(enum.StrEnum):
    """The kind of evidence, strongest first."""

    EXACT = "exact"
    """A symbolic identity, an SMT proof, exact rationals."""
    EXHAUSTIVE = "exhaustive"
    """Every case of a finite range."""
    STATISTICAL = "statistical"
    """A test with a fixed seed and a stated probability of a false alarm."""
    NUMERICAL = "numerical"
    """Floating point within a derived tolerance."""
    EMPIRICAL = "empirical"
    """A training run or a measurement within a recorded range."""


class Badge(enum.StrEnum):
    """The strength of the evidence for a claim."""

    PROVED = "proved"
    VERIFIED = "verified on stated ranges"
    ILLUSTRATED = "illustrated"
    NOT_RUN = "not run"
    """The badge of a run in which no evidence was examined; no claim records it."""


class Truth(enum.StrEnum):
    """The result of checking the source's own statement."""

    TRUE = "TRUE"
    IMPRECISE = "TRUE*"
    FALSE = "FALSE"
    TASK = "TASK"
    """Something to build; the check tests our implementation."""
    DISCUSSION = "DISCUSSION"
    OPEN = "OPEN"
    """A question without an answer in the source."""
    ILL_POSED = "ILL-POSED"
    ABSENT = "ABSENT"


@dataclass(frozen=True)
class Erratum:
    """An error in a source and the smallest example that shows it."""

    id: str
    sources: tuple[str, ...]
    flaw: str
    """wrong, incomplete, imprecise, absent or arithmetic."""
    states: str
    """What the source states, in our words."""
    fails: str
    """Why that fails."""
    correct: str
    """What holds instead."""
    example: str
    """Self-contained Python that sets `holds`: whether the source's statement holds in this example."""

    def examine(self) -> Finding:
        """Run the example. If the source's statement holds, the erratum is wrong and the Finding fails."""
        names: dict[str, Any] = {}
        exec(compile(self.example, f"<{self.id}>", "exec"), names)  # our own code, never a user's
        shown = {k: v for k, v in names.items() if isinstance(v, bool | int | float | str) and not k.startswith("_")}
        held = float(bool(names["holds"]))
        why = "the source's statement fails on the example"
        return Finding.judge(self.id, held, 0.0, why, values=shown, kind=ERRATUM)


@dataclass(frozen=True)
class Knob:
    """A parameter of a check or a figure that a reader may change."""

    name: str
    default: float
    low: float
    high: float
    step: float = 1.0
    label: str = ""


@dataclass(frozen=True)
class Source:
    """One row of the coverage table: an exercise, its statement, and the result of checking it."""

    cite: str
    says: str
    verdict: Truth
    items: tuple[str, ...]
    errata: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Claim:
    id: str
    chapter: str
    title: str
    statement: str
    """In our own words; formulas between dollar signs."""
    kinds: tuple[Kind, ...]
    badge: Badge
    derivation: tuple[str, ...]
    """The steps of the derivation."""
    control: str
    """The hypothesis that the negative control violates."""
    module: str
    """Module of the check and the figure, in the folder of the chapter."""
    sources: tuple[Source, ...]
    evidence: Mapping[str, str] = field(default_factory=dict)
    """The reason for the bound of each piece of evidence, by its id."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Numbers that the check compares with: those of the statement, as printed, or those of a recorded run."""
    errata: tuple[Erratum, ...] = ()
    knobs: tuple[Knob, ...] = ()
    slow: bool = False
    """True if the check trains a model or takes minutes: it runs only with --slow."""
    has_figure: bool = True

    def check(self, lab: "Lab") -> Iterator[Finding]:
        """Yield the evidence, each piece with its reason."""
        for part in CHECKS[self.id](lab):
            yield part if part.why else replace(part, why=self.reason(part))

    def reason(self, part: Finding) -> str:
        """Return the sentence for a piece of evidence: of the keys that fit, the one with most text of its own."""
        for key in sorted(self.evidence, key=lambda key: len(PLACEHOLDER.sub("", key)), reverse=True):
            found = re.fullmatch(id_pattern(key), part.id)
            if found:
                break
        else:
            raise KeyError(f"[evidence] of {self.id} has no reason for {part.id!r}")
        values = {**part.evidence, **found.groupdict()}
        return PLACEHOLDER.sub(lambda name: str(values[name[1]]), self.evidence[key])

    @property
    def figure(self) -> Draw | None:
        return FIGURES.get(self.id)


def id_pattern(key: str) -> str:
    """Return the regular expression of the ids that a key of `[evidence]` stands for."""
    return PLACEHOLDER.sub(r"(?P<\1>.+)", re.escape(key))


def claim(id: str) -> Callable[[Check], Check]:
    """Registers the check of a claim."""

    def register(check: Check) -> Check:
        CHECKS[id] = check
        return check

    return register


def figure(id: str, title: str, **size: Any) -> Callable[[Callable[["Lab", "Figure"], None]], Draw]:
    """Registers the figure of a claim: a function that draws on an empty figure with this title, width and height.

    The title may contain the claim's knobs in braces.
    """

    def register(draw: "Callable[[Lab, Figure], None]") -> Draw:
        def drawn(lab: Lab) -> "Figure":
            from glassformer.lens.figure import drawing  # imports torch, which a list of claims does not need

            with drawing(title.format_map(lab.knobs), **size) as fig:
                draw(lab, fig)
            return fig

        FIGURES[id] = drawn
        return drawn

    return register


@dataclass(frozen=True)
class Lab:
    """The context of a check: its seed, its knobs, whether its hypothesis is violated, whether slow parts run."""

    seed: int = 0
    broken: bool = False
    slow: bool = False
    knobs: Mapping[str, float] = field(default_factory=dict)

    def rng(self, stream: int = 0) -> "np.random.Generator":
        """Return NumPy's generator for this seed; different streams are independent."""
        import numpy as np

        return np.random.default_rng([self.seed, stream])

    def torch_rng(self, stream: int = 0) -> "torch.Generator":
        import torch

        return torch.Generator().manual_seed(1_000_003 * self.seed + stream)

    # one constructor per kind of evidence, so that each has its required arguments; `Claim.check` adds the reason

    def exact(self, id: str, holds: bool, **evidence: Any) -> Finding:
        """Return the Finding of a proof or an identity, which holds or does not hold."""
        return self._mark(Kind.EXACT, Finding.judge(id, 0.0 if holds else 1.0, 0.0, "", **evidence))

    def exhaustive(self, id: str, wrong: int, cases: int, **evidence: Any) -> Finding:
        """Return the Finding of an enumeration: no case may be wrong, and there must be at least one case."""
        measured = float(wrong) if cases else float("nan")
        return self._mark(Kind.EXHAUSTIVE, Finding.judge(id, measured, 0.0, "", cases=cases, **evidence))

    def statistical(
        self, id: str, measured: float, bound: float, delta: float, low: float | None = None, **evidence: Any
    ) -> Finding:
        """Return the Finding of a sample statistic; `delta` is the probability that it exceeds its bound by chance."""
        found = Finding.within(id, measured, low, bound, "", delta=delta, seed=self.seed, **evidence)
        return self._mark(Kind.STATISTICAL, found)

    def numerical(
        self, id: str, measured: float, bound: float | None, low: float | None = None, **evidence: Any
    ) -> Finding:
        """Return the Finding of a measurement with a derived tolerance, or with a minimum `low` that it must exceed."""
        return self._mark(Kind.NUMERICAL, Finding.within(id, measured, low, bound, "", **evidence))

    def empirical(self, id: str, measured: float, low: float | None, high: float | None, **evidence: Any) -> Finding:
        """Return the Finding of a measurement with its recorded range."""
        found = Finding.within(id, measured, low, high, "", seed=self.seed, **evidence)
        return self._mark(Kind.EMPIRICAL, found)

    def skipped(self, id: str, kind: Kind, why: str, remedy: str = "") -> Finding:
        """Return the Finding of evidence that could not be obtained here, with the reason."""
        return self._mark(kind, Finding.skip(id, why, remedy))

    @staticmethod
    def _mark(kind: Kind, finding: Finding) -> Finding:
        finding.evidence["kind"] = str(kind)
        return finding


def solve(lab: Lab, id: str, prove: Callable[[Any], bool], **evidence: Any) -> Finding:
    """Evidence by z3: `prove(z3)` returns whether the solver gave the required answer. Without z3 it is skipped."""
    try:
        import z3
    except ImportError:
        return lab.skipped(id, Kind.EXACT, "z3 is not installed, so this proof did not run", install("theory"))
    return lab.exact(id, prove(z3), solver="z3", **evidence)


def impossible(z3: Any, *conditions: Any) -> bool:
    """Return whether z3 proves that nothing satisfies all conditions."""
    solver = z3.Solver()
    solver.add(*conditions)
    return bool(solver.check() == z3.unsat)


def possible(z3: Any, *conditions: Any) -> bool:
    """Return whether z3 finds something that satisfies all conditions."""
    solver = z3.Solver()
    solver.add(*conditions)
    return bool(solver.check() == z3.sat)


def reached(claim: Claim, parts: Sequence[Mapping[str, Any]]) -> Badge:
    """Return the badge that the evidence of one run supports, given its Findings as dictionaries.

    It is the recorded badge, unless evidence was skipped: a claim is not proved by a proof that did not run.
    """
    evidence = [(Kind(part["evidence"]["kind"]), part["verdict"]) for part in parts if _is_evidence(part)]
    examined = {kind for kind, verdict in evidence if verdict != Verdict.SKIP}
    skipped = {kind for kind, verdict in evidence if verdict == Verdict.SKIP}
    if not examined:
        return Badge.NOT_RUN
    if claim.badge is Badge.PROVED and not skipped & {Kind.EXACT, Kind.EXHAUSTIVE}:
        return Badge.PROVED
    if skipped and examined == {Kind.EMPIRICAL}:
        return Badge.ILLUSTRATED
    return Badge.VERIFIED if claim.badge is Badge.PROVED else claim.badge


def _is_evidence(part: Mapping[str, Any]) -> bool:
    """Return whether a part is about the statement itself and not about an error in a source."""
    return part["evidence"].get("kind") != ERRATUM


def conclude(claim: Claim, parts: list[Finding]) -> Finding:
    """Combine all parts into one Finding: any failure fails it; it is skipped if nothing was examined.

    Skipped parts are named. Errata alone do not make it pass, because they are not evidence for the statement.
    """
    failed = [p for p in parts if p.verdict is Verdict.FAIL]
    skipped = [p for p in parts if p.verdict is Verdict.SKIP]
    examined = [p for p in parts if p.verdict is not Verdict.SKIP and p.evidence.get("kind") != ERRATUM]
    verdict = Verdict.FAIL if failed else Verdict.PASS if examined else Verdict.SKIP
    decisive = (failed or sorted(examined, key=_tightness))[-1:] or skipped
    why = f"{decisive[0].id}: {decisive[0].why}" if decisive else "no evidence"
    if skipped and examined:
        remedy = f"; to examine it, {skipped[0].remedy}" if skipped[0].remedy else ""
        why += f"; not examined: {', '.join(p.id for p in skipped)} ({skipped[0].why}{remedy})"
    details = [plain(p.to_dict()) for p in parts]
    evidence = {"badge": str(reached(claim, details)), "parts": details}
    first = decisive[0] if decisive else Finding.skip(claim.id, why)
    return Finding(claim.id, verdict, first.measured, first.bound, why, first.remedy, evidence, first.low)


def plain(value: Any) -> Any:
    """Convert a value for JSON: arrays and tuples to lists, numbers of any library to Python's, the rest to text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # NumPy's and torch's, scalars included
        return plain(value.tolist())
    if isinstance(value, list | tuple | set | frozenset | range):
        return [plain(item) for item in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return str(value)


def _tightness(part: Finding) -> float:
    """Return how close a measurement is to its bound; exact parts, which have no margin, sort first."""
    if part.measured is None or not part.bound:
        return -1.0
    return abs(part.measured) / abs(part.bound)
