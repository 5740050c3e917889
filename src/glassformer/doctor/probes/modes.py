"""Eval is deterministic, training is random where dropout is declared, and no call leaves anything behind."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from glassformer.doctor.probes.caching import run_chunks
from glassformer.doctor.subject.isolate import NoDropout
from glassformer.doctor.subject.measure import CROSS_WHY, SAME_WHY, cross_shape_bound, gap
from glassformer.doctor.subject.rounding import Measured, first_over, in_double, judge, prefix_noise, shrinks, untouched
from glassformer.doctor.subject.snapshot import seed_torch
from glassformer.doctor.subject.subject import Subject
from glassformer.finding import Finding, Verdict

CALLS = 5
"""A small dropout can miss two calls on a short input."""


def eval_is_deterministic(subject: Subject) -> Finding:
    """Five calls in eval mode on a long input agree to the bit."""

    def measure(isolated: Subject) -> Measured:
        # a small dropout shows among many draws: of positions in a small model, of layers and widths in a large one
        tokens = isolated.tokens(isolated.rows(2), isolated.length(isolated.lengths()[-1], if_large=24), seed=1)
        first = isolated.logits(tokens)
        return first_over([untouched(first, isolated.logits(tokens), SAME_WHY, call=i) for i in range(1, CALLS)])

    remedy = "Something draws random numbers in eval mode: training=self.training for F.dropout, dropout_p=0 in eval."
    with subject.isolated() as isolated:
        found = measure(isolated)
    # a sum that a device adds in another order at each call is rounding: it is nearly gone in float64, dropout is not
    if found.ratio > 1 and subject.device.type != "cpu" and shrinks(found, in_double(subject, measure)):
        found = replace(found, gap=0.0, evidence={**found.evidence, "rounding": found.gap})
    verdict = Verdict.PASS if found.ratio <= 1 else Verdict.FAIL
    finding = Finding("eval_stochastic/repeat", verdict, found.gap, found.bound, found.why, remedy, found.evidence)
    if verdict is Verdict.FAIL and _differs_with_one_seed(subject):
        why = "the same call gives other logits the second time although the random numbers are the same"
        return replace(finding, id="state_leak/repeat", why=why, remedy=KEPT)
    return finding


KEPT = "Something is kept between calls: a shared cache, a table resized by a long input, an encoded source."


def _differs_with_one_seed(subject: Subject) -> bool:
    with subject.isolated() as isolated:
        tokens = isolated.tokens(isolated.rows(2), isolated.length(isolated.lengths()[-1], if_large=24), seed=1)
        results = []
        for _ in range(3):
            seed_torch()
            results.append(isolated.logits(tokens))
    return max(gap(results[0], other) for other in results[1:]) > 0


def dropout_probability(subject: Subject) -> float:
    """The largest declared dropout: of a module, else of the config."""
    found = [0.0]
    if subject.module is not None:
        found += [float(m.p) for m in subject.module.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
    declared = subject.facts.number("dropout")
    return max([*found, declared or 0.0])


def training_is_random(subject: Subject) -> Finding:
    """With dropout declared, two training calls differ, also after an evaluation in between."""
    id = "eval_stochastic/train-eval-train"
    p = dropout_probability(subject)
    if p <= 0 or subject.module is None:
        return Finding.skip(id, "no dropout is declared")
    remedy = (
        "Dropout is declared and never falls, or stays off after the first eval(): do not overwrite its probability."
    )
    with subject.isolated(train=True) as isolated:
        assert isolated.module is not None
        tokens = isolated.tokens(2, isolated.length(24, if_large=8), seed=1)
        before = gap(isolated.logits(tokens), isolated.logits(tokens))
        isolated.module.eval()
        isolated.logits(tokens)
        isolated.module.train()
        after = gap(isolated.logits(tokens), isolated.logits(tokens))
    random = before > 0 and after > 0
    why = f"dropout {p:g} is declared, so two training calls must differ" + (
        "" if before > 0 == after > 0 else " after eval(), too"
    )
    verdict = Verdict.PASS if random else Verdict.FAIL
    return Finding(id, verdict, min(before, after), None, why, remedy, {"before": before, "after": after})


def train_equals_eval(subject: Subject) -> Finding:
    """The same positions and context in training and in evaluation: train() without dropout against eval()."""
    id = "position_train_infer/modes"
    if subject.module is None:
        return Finding.skip(id, "not a module, so it has no modes")

    def measure(isolated: Subject) -> Measured:
        assert isolated.module is not None
        found = []
        for length in [t for t in isolated.lengths() if t >= 24] or isolated.lengths():
            tokens = isolated.tokens(isolated.rows(2), length, seed=6)
            with NoDropout():
                isolated.module.eval()
                quiet = isolated.logits(tokens)
                noise = prefix_noise(isolated, tokens, quiet)
                isolated.module.train()
                seed_torch()
                busy = isolated.logits(tokens)
                again = isolated.logits(tokens)
                isolated.module.eval()
            if gap(busy, again) > 0:
                return Measured(0.0, 1.0, "training draws random numbers beyond dropout, so it was not compared")
            found.append(Measured(gap(busy, quiet), cross_shape_bound(quiet, noise), CROSS_WHY, {"length": length}))
        return first_over(found)

    remedy = "Train and eval mode see different positions (or context, or masks) for the same input: use one code path."
    return judge(subject, id, measure, remedy)


def nothing_is_remembered(subject: Subject) -> Iterator[Finding]:
    """f(x), then other calls, then f(x) again: the same to the bit."""
    remedy = KEPT

    def plain(isolated: Subject) -> Measured:
        tokens = isolated.tokens(2, isolated.length(13), seed=4)
        first = isolated.logits(tokens)
        isolated.logits(isolated.tokens(isolated.rows(3), isolated.lengths()[-1], seed=5))
        second = isolated.logits(tokens)
        isolated.logits(isolated.tokens(1, isolated.length(2), seed=6))
        third = isolated.logits(tokens)
        found = [untouched(first, second, SAME_WHY, after="a long input")]
        return first_over([*found, untouched(first, third, SAME_WHY, after="a short input")])

    yield judge(subject, "state_leak/calls", plain, remedy, warm=False)
    if subject.kind == "seq2seq":

        def sources(isolated: Subject) -> Measured:
            tokens = isolated.tokens(2, isolated.length(9), seed=4)
            isolated.logits(tokens, source=isolated.source(2))
            second = isolated.logits(tokens, source=isolated.source(2, seed=78))
            with subject.isolated(dtype=isolated.dtype) as fresh:
                expected = fresh.logits(tokens, source=fresh.source(2, seed=78))
            return untouched(expected, second, SAME_WHY, after="another source")

        yield judge(subject, "state_leak/sources", sources, remedy, warm=False)
    if not subject.has_cache:
        return

    def cached(isolated: Subject) -> Measured:
        tokens, others = (isolated.tokens(2, isolated.length(12), seed=seed) for seed in (4, 7))
        plain, sizes = isolated.logits(tokens), [4, 1, 7] if isolated.large else [4, 1, 1, 6]
        first, _ = run_chunks(isolated, tokens, sizes)
        between, _ = run_chunks(isolated, others, sizes, **_source(isolated, 78))
        second, _ = run_chunks(isolated, tokens, sizes)
        with subject.isolated(isolated.look[0], None if isolated.dtype == subject.dtype else isolated.dtype) as fresh:
            expected, _ = run_chunks(fresh, others, sizes, **_source(fresh, 78))
        found = [untouched(expected, between, SAME_WHY, after="a cached run of other tokens")]
        found.append(untouched(first, second, SAME_WHY, after="a cached run of other tokens"))
        found.append(untouched(plain, isolated.logits(tokens), SAME_WHY, after="cached runs"))
        return first_over(found)

    yield judge(subject, "state_leak/cached-runs", cached, remedy, warm=False)
    if subject.interface.internal:  # such a model holds one sequence at a time
        return

    def alternating(isolated: Subject) -> Measured:
        tokens, others = (isolated.tokens(2, isolated.length(10), seed=seed) for seed in (4, 7))
        alone, _ = run_chunks(isolated, tokens, [4, 1, 1])
        _, mine = run_chunks(isolated, tokens, [4])
        _, theirs = run_chunks(isolated, others, [4], **_source(isolated, 78))
        one, mine = run_chunks(isolated, tokens, [1], cache=mine, start=4)
        _, theirs = run_chunks(isolated, others, [1], cache=theirs, start=4, **_source(isolated, 78))
        two, _ = run_chunks(isolated, tokens, [1], cache=mine, start=5)
        return untouched(alone[:, 4:6], torch.cat([one, two], dim=1), SAME_WHY, after="another cache in alternation")

    yield judge(subject, "state_leak/two-caches", alternating, remedy, warm=False)


def _source(isolated: Subject, seed: int) -> dict[str, Any]:
    return {"source": isolated.source(2, seed=seed)} if isolated.kind == "seq2seq" else {}
