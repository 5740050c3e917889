"""Run many claims, sequentially or in several processes. Outcomes come in order and are reproducible for a seed."""

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from typing import Any

from glassformer.finding import Finding, Verdict
from glassformer.theory.claims.claim import Badge, Claim, Lab, reached
from glassformer.theory.claims.registry import ClaimError, check, find, load_all


@dataclass(frozen=True)
class Plan:
    """Options of a run of claims."""

    seed: int = 0
    slow: bool = False
    broken: bool = False
    """Run the negative control instead of the claim."""
    draw: bool = False
    """Draw the figure as well."""


@dataclass(frozen=True)
class Outcome:
    """The result of one claim."""

    claim: Claim
    finding: Finding
    seconds: float
    plan: Plan
    crashed: bool = False
    svg: str = ""

    @property
    def expected(self) -> Verdict:
        """The expected verdict: pass; skip for a slow claim without --slow; fail for a negative control."""
        if self.claim.slow and not self.plan.slow:
            return Verdict.SKIP
        return Verdict.FAIL if self.plan.broken else Verdict.PASS

    @property
    def held(self) -> bool:
        """Whether the verdict is the expected one. A crash never is: a control must make a check fail, not crash."""
        return self.finding.verdict is self.expected and not self.crashed

    @property
    def badge(self) -> Badge:
        """The badge that the evidence of this run supports."""
        return reached(self.claim, self.parts)

    @property
    def parts(self) -> list[dict[str, Any]]:
        """The pieces of evidence."""
        parts: list[dict[str, Any]] = self.finding.evidence.get("parts", [])
        return parts

    def to_dict(self) -> dict[str, Any]:
        claim = self.claim
        facts = {"id": claim.id, "chapter": claim.chapter, "title": claim.title, "badge": str(self.badge)}
        result = self.finding.to_dict()
        result.pop("evidence")
        return {
            **facts,
            **result,
            "expected": str(self.expected),
            "held": self.held,
            "crashed": self.crashed,
            "seconds": round(self.seconds, 3),
            "sources": [{"cite": s.cite, "verdict": str(s.verdict)} for s in claim.sources],
            "errata": [e.id for e in claim.errata],
            "parts": self.parts,
        }


def run(ids: Sequence[str], plan: Plan = Plan(), *, workers: int = 1) -> Iterator[Outcome]:
    """Yield outcomes in the order of the ids. Several workers are processes, whose main module must be importable.

    Each claim has its own seeded generators, one thread and no shared state, so neither the number of workers nor the
    order changes a result.
    """
    if workers < 1:
        raise ClaimError(f"workers={workers} must be at least 1.")
    if workers == 1 or len(ids) < 2:
        yield from (_outcome(id, plan, examine(id, plan)) for id in ids)
        return
    waiting = list(ids)
    while waiting:
        done = 0
        with _pool(min(workers, len(waiting))) as pool:
            with _interrupt_blocked():
                futures = [pool.submit(examine, id, plan) for id in waiting]
            try:
                for id, future in zip(waiting, futures, strict=True):
                    yield _outcome(id, plan, future.result())
                    done += 1
            except BrokenProcessPool:
                pass
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
        waiting = waiting[done:]
        if waiting:  # a process died: run the next claim alone, so that the right claim is blamed
            yield _outcome(waiting[0], plan, _alone(waiting.pop(0), plan))


def _pool(workers: int) -> concurrent.futures.ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")  # a forked torch may hang
    return concurrent.futures.ProcessPoolExecutor(workers, mp_context=context, initializer=_restore_interrupt)


@contextlib.contextmanager
def _interrupt_blocked() -> Iterator[None]:
    """Block Ctrl-C while workers start: they inherit the blocked signal until `_restore_interrupt` sets its handler."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _restore_interrupt() -> None:
    """Make Ctrl-C end a worker immediately and without a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _alone(id: str, plan: Plan) -> dict[str, Any]:
    with _pool(1) as pool:
        try:
            with _interrupt_blocked():
                future = pool.submit(examine, id, plan)
            return future.result()
        except BrokenProcessPool:
            finding = Finding(id, Verdict.FAIL, why="the process that ran it died (out of memory?)")
            return {"finding": finding, "seconds": 0.0, "crashed": True, "svg": ""}


def examine(id: str, plan: Plan) -> dict[str, Any]:
    """Run one claim in this process. A crash becomes a failure that names the error."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the same order of summation on every machine
    start = time.perf_counter()
    crashed, svg = False, ""
    try:
        finding = check(id, seed=plan.seed, slow=plan.slow, broken=plan.broken)
        if plan.draw and load_all()[id].has_figure:
            svg = draw(id, plan.seed).svg()
    except Exception as error:
        if os.environ.get("GLASSFORMER_DEBUG"):
            raise
        crashed, finding = True, Finding(id, Verdict.FAIL, why=_crash(error))
    finally:
        torch.set_num_threads(threads)
    return {"finding": finding, "seconds": time.perf_counter() - start, "crashed": crashed, "svg": svg}


def _crash(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    words = " ".join(str(error).split())
    return f"crashed: {type(error).__name__}: {words} ({os.path.basename(frame.filename)}, line {frame.lineno})"


def _outcome(id: str, plan: Plan, result: dict[str, Any]) -> Outcome:
    return Outcome(load_all()[id], plan=plan, **result)


def draw(id: str, seed: int = 0) -> Any:
    """Return the figure of a claim, a `lens.figure.Figure`."""
    claim = find(id)
    if claim.figure is None:
        raise ClaimError(f"{id} has no figure: `glass check {id} --explain` shows its evidence.")
    return claim.figure(Lab(seed, knobs={knob.name: knob.default for knob in claim.knobs}))


def summary(outcomes: Sequence[Outcome], plan: Plan) -> dict[str, Any]:
    """Return all outcomes as one JSON object."""
    verdicts = [str(outcome.finding.verdict) for outcome in outcomes]
    return {
        **asdict(plan),
        "held": all(outcome.held for outcome in outcomes),
        "verdicts": {str(verdict): verdicts.count(str(verdict)) for verdict in Verdict},
        "seconds": round(sum(outcome.seconds for outcome in outcomes), 3),
        "claims": [outcome.to_dict() for outcome in outcomes],
    }
