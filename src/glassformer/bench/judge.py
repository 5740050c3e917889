"""Judge whether all contenders ran the same model, and whether targets were reached, missed or not measured."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from glassformer.bench.result import ENOUGH_ROUNDS, Group, Row, number
from glassformer.bench.startup import READING
from glassformer.finding import Finding, Verdict

RATIO = {
    "decode": dict.fromkeys(("float32", "bfloat16", "int8", "int4"), 1.0),
    "prefill": dict.fromkeys(("float32", "bfloat16", "int8", "int4"), 1.0),
    "encode": {"float32": 1.0},
    "train": {"float32": 1.15, "bfloat16": 1.3, "float8": 1.7},
}
"""Minimum ratio to the best peer in the same precision."""
OF_BANDWIDTH = {"float32": 0.8, "bfloat16": 0.8, "int8": 0.7}
"""Minimum share of the measured bandwidth, decoding one sequence."""
STARTUP = 1.15
"""Maximum ratio to the time of `import torch` and reading the file."""
STATES = 1e-3
"""Largest difference of hidden states in float32, divided by the largest of them."""
LOSS = {"float32": 1e-3, "bfloat16": 1e-2}
"""Nats by which a step's loss may differ from ours. Rounding grows from step to step (after 60: 5e-7 and 2e-3)."""

LAST_LOSS = {"float32": 1e-2, "bfloat16": 0.1}
"""Nats by which the first and the last loss of a model may differ from ours."""


def first_difference(ids: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> int | None:
    """Return the number of tokens before the first difference in any sequence; None if there is none."""
    ends = []
    for mine, theirs in zip(ids, reference, strict=True):
        ends += [i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b][:1]
    return min(ends) if ends else None


def compare_ids(group: Group, reference: list[list[int]], comparable: set[str]) -> list[Finding]:
    """Compare greedy ids with the torch engine's in float32; in other precisions differences are only reported."""
    findings = []
    for row in group.rows:
        if row.died or not row.ids or row.name not in comparable:
            row.agrees = row.agrees or ("" if row.name in comparable else "another architecture")
            continue
        at = first_difference(row.ids, reference)
        total = len(reference[0])
        same = "the same ids" if at is None else f"differs after {at} of {total}"
        row.agrees = f"{same}; {row.agrees}" if row.agrees else same
        if group.precision == "float32":
            why = "in float32 the greedy ids of every contender must equal those of our torch engine"
            remedy = "it runs another model: check its conversion before comparing it."
            findings.append(Finding.judge(f"same-ids:{row.name}", 0.0 if at is None else total - at, 0, why, remedy))
    return findings


def compare_states(group: Group, reference: Sequence[Sequence[float]], comparable: set[str]) -> list[Finding]:
    """Compare means of hidden states with the torch engine's in float32; in other precisions they are reported."""
    findings = []
    size = max(abs(value) for row in reference for value in row)
    for row in group.rows:
        if row.died or not row.ids:
            continue
        apart = max(
            abs(a - b) for one, two in zip(row.ids, reference, strict=True) for a, b in zip(one, two, strict=True)
        )
        row.agrees = f"states {apart / size:.0e} apart"
        if group.precision == "float32":
            why = "in float32 every contender must compute the hidden states of our torch engine"
            remedy = "it runs another model: check its conversion before comparing it."
            findings.append(Finding.judge(f"same-states:{row.name}", apart / size, STATES, why, remedy))
    return findings


def _losses(group: Group) -> Iterator[tuple[Row, list[Any], Row]]:
    """Yield every row that was measured, its losses, and our row."""
    ours = next((row for row in group.rows if row.ours and row.measured), None)
    for row in group.rows:
        if ours is not None and row.measured:
            yield row, row.ids[0], ours


def compare_losses(group: Group) -> list[Finding]:
    """Compare the losses of each step with ours; and ours must fall."""
    findings = []
    for row, losses, ours in _losses(group):
        apart = max(abs(a - b) for a, b in zip(losses, ours.ids[0], strict=False))
        row.agrees = f"loss {losses[0]:.3f} to {losses[-1]:.3f}" + ("" if row is ours else f", {apart:.1e} from ours")
        bound, name = LOSS[group.precision], f"{row.name} {group.setting}"
        why = f"the same weights and batches in {group.precision} must give the same loss at each step"
        remedy = "one of the two does not compute a full training step: compare their steps."
        if row is ours:
            fell = losses[-1] - losses[0]
            findings.append(Finding.judge(f"it-learns:{name}", fell, -0.01, "the loss of a training step must fall"))
        else:
            findings.append(Finding.judge(f"same-loss:{name}", apart, bound, why, remedy))
    return findings


def compare_last_losses(group: Group) -> list[Finding]:
    """Compare the losses at the end with ours, which must have fallen.

    The steps of a large model round differently, and their losses differ on the way; they meet where both have learned
    the tokens that are used.
    """
    findings = []
    for row, losses, ours in _losses(group):
        first, last = abs(losses[0] - ours.ids[0][0]), abs(losses[-1] - ours.ids[0][-1])
        apart = "" if row is ours else f", {first:.1e} and {last:.1e} from {ours.name}"
        row.agrees = f"loss {losses[0]:.3f} to {losses[-1]:.3f}{apart}"
        why = "the loss of a training step must fall"
        findings.append(Finding.judge(f"it-learns:{row.name}", losses[-1] - losses[0], -0.01, why))
        if row is not ours:
            why = "the same weights and batches must give the same loss, within rounding"
            remedy = "one of the two does not compute a full training step: compare their steps."
            bound = LAST_LOSS[group.precision]
            findings.append(Finding.judge(f"same-loss:{row.name}", max(first, last), bound, why, remedy))
    return findings


def failed_contenders(groups: Sequence[Group]) -> list[Finding]:
    """Return a finding for each contender that started and did not finish."""
    return [
        Finding(
            f"alive:{row.name}:{row.precision}",
            Verdict.FAIL,
            why=row.died,
            remedy="run it alone to see its output.",
        )
        for group in groups
        for row in [*group.rows, *([] if group.bandwidth is None else [group.bandwidth])]
        if row.died
    ]


def targets(plan: dict[str, Any], groups: Sequence[Group], plain: Sequence[Row]) -> list[Finding]:
    """Judge the targets of this run: ratios for every model, start-up and share of the bandwidth for GPT-2 small."""
    is_gpt2_on_cpu = plan["model"].lower() == "gpt2" and plan.get("device", "cpu") == "cpu"
    if plan["task"] == "startup":
        return startup_targets(groups, plain) if is_gpt2_on_cpu and not plan.get("training") else []
    findings = []
    for group in groups:
        findings += _ratio_target(plan, group)
        if plan["task"] == "decode" and plan["batch"] == 1 and is_gpt2_on_cpu:
            findings += _bandwidth_target(group)
    return findings


def _ratio_target(plan: dict[str, Any], group: Group) -> list[Finding]:
    rows = {row.precision: row for row in group.rows if row.ours}
    if len(rows) < 2:  # several rows of ours with one precision are ways to compute the same: the best one counts
        return _one_ratio_target(plan, group, group.precision, group.ours())
    return [found for name, row in rows.items() for found in _one_ratio_target(plan, group, name, row)]


def _one_ratio_target(plan: dict[str, Any], group: Group, precision: str, ours: Row | None) -> list[Finding]:
    least, peer = RATIO[plan["task"]].get(precision), group.best_peer()
    if least is None:
        return []
    what = ":".join(filter(None, ("target", plan["task"], precision, group.setting)))
    if plan["task"] == "decode" and plan["batch"] > 1:
        what += f":batch {plan['batch']}"
    if ours is None or not ours.measured:
        return [Finding.skip(what, f"we did not run in {precision}", "see above which died.")]
    if peer is None:
        return [Finding.skip(what, f"no peer ran in {group.precision}", "install one, see the missing ones above.")]
    if reason := _why_unreliable(group, ours, peer):
        return [Finding.skip(what, reason, QUIET)]
    ratio = group.ratio(ours, peer)
    assert ratio is not None
    why = f"{ours.name} {number(ours.median)}, best peer {peer.name} {number(peer.median)} {group.unit}"
    return [Finding.within(what, ratio, least, None, why, _short(ratio, least))]


QUIET = "measure again on a quiet machine, with more --rounds."


def _why_unreliable(group: Group, ours: Row, peer: Row) -> str:
    """Return why a comparison with the best peer is not meaningful; empty if it is."""
    if few := _too_few(ours, peer):
        return few
    if ours.disturbed:
        return f"{ours.name} was {ours.disturbed}"
    for row in group.rows:  # a disturbed peer may be the best one
        if not row.ours and row.measured and row.disturbed and max(row.rounds) >= peer.median:
            return f"{row.name} was {row.disturbed}"
    return ""


def _too_few(*rows: Row) -> str:
    rounds = min(len(row.rounds) for row in rows)
    if rounds >= ENOUGH_ROUNDS:
        return ""
    return f"{rounds} round{'s' * (rounds > 1)} cannot show whether they were disturbed, {ENOUGH_ROUNDS} can"


def _bandwidth_target(group: Group) -> list[Finding]:
    least, ours = OF_BANDWIDTH.get(group.precision), group.ours()
    if least is None:
        return []
    what = f"target:bandwidth:{group.precision}"
    share = None if ours is None else group.share(ours)
    if ours is None or share is None or group.bandwidth is None:
        return [Finding.skip(what, "our contender or the bandwidth measurement did not run", "see above which died.")]
    if reason := _too_few(ours, group.bandwidth) or group.why_no_share(ours):
        return [Finding.skip(what, reason, QUIET)]
    read = group.bandwidth.best
    why = (
        f"{group.weight_bytes / 1e6:,.0f} MB of weights per token, memory read at {read / 1e9:.1f} GB/s: "
        f"at most {read / group.weight_bytes:,.0f} tokens/s"
    )
    return [Finding.within(what, share, least, None, why, _short(share, least))]


def startup_targets(groups: Sequence[Group], plain: Sequence[Row]) -> list[Finding]:
    """Compare our time to the first token with the time that cannot be avoided."""
    known = {row.name: row for row in plain if row.measured}
    if "import torch" not in known or READING not in known:
        return [Finding.skip("target:startup", "importing torch or reading the file failed", "see above which died.")]
    unavoidable = [known["import torch"], known[READING]]
    floor = sum(row.median for row in unavoidable)
    findings = []
    for group in groups:
        for row in group.rows:
            if row.ours and row.measured:
                why = f"{row.median:.2f} s against {floor:.2f} s for importing torch and reading the file"
                ratio = row.median / floor
                what = f"target:startup:{row.name}:{group.precision}"
                unreliable = _too_few(row, *unavoidable) or next(
                    (f"{one.name} was {one.disturbed}" for one in (row, *unavoidable) if one.disturbed), ""
                )
                judged = Finding.judge(what, ratio, STARTUP, why, _over(ratio, STARTUP))
                findings.append(Finding.skip(what, unreliable, QUIET) if unreliable else judged)
    return findings


def _short(value: float, least: float) -> str:
    return f"missed by {least - value:.3f}."


def _over(value: float, most: float) -> str:
    return f"missed by {value - most:.3f}." if math.isfinite(value) else "not measured."


def sentence(finding: Finding) -> str:
    """Return the verdict on a target as a sentence: reached, missed, or not measured and why."""
    name = finding.id.removeprefix("target:").replace(":", ", ")
    if finding.verdict is Verdict.SKIP:
        return f"{name}: not measured: {finding.why}; {finding.remedy}"
    if finding.passed:
        return f"{name}: reached, {finding.numbers()} ({finding.why})."
    return f"{name}: {finding.remedy.rstrip('.')}, {finding.numbers()} ({finding.why})."
