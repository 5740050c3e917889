"""Whether all contenders run the same model, and whether targets are reached, missed or not measurable."""

import math
from collections.abc import Sequence
from typing import Any

from glassformer.bench.result import ENOUGH_ROUNDS, Group, Row, number
from glassformer.bench.startup import READING
from glassformer.finding import Finding, Verdict

RATIO = {
    "decode": {"float32": 1.0, "bfloat16": 1.0, "int8": 1.0},
    "prefill": {"float32": 1.0, "bfloat16": 1.0, "int8": 1.0},
    "train": {"float32": 1.15, "bfloat16": 1.3},
}
"""Least times the best peer in the same precision."""
OF_BANDWIDTH = {"float32": 0.8, "bfloat16": 0.8, "int8": 0.7}
"""Least share of the measured bandwidth, decoding one row."""
STARTUP = 1.15
"""Most times `import torch` and reading the file."""
LOSS = {"float32": 1e-3, "bfloat16": 1e-2}
"""Nats by which a step's loss may differ from ours: rounding, which grows from step to step (over 60: 5e-7, 2e-3)."""


def parting(ids: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> int | None:
    """How many tokens agree before the first row parts; None when nothing parts."""
    ends = []
    for mine, theirs in zip(ids, reference, strict=True):
        ends += [i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b][:1]
    return min(ends) if ends else None


def compare_ids(group: Group, reference: list[list[int]], comparable: set[str]) -> list[Finding]:
    """Greedy ids against the plain engine's in float32; in other precisions only told, since rounding may move them."""
    findings = []
    for row in group.rows:
        if row.died or not row.ids or row.name not in comparable:
            row.agrees = row.agrees or ("" if row.name in comparable else "another architecture")
            continue
        at = parting(row.ids, reference)
        total = len(reference[0])
        same = "the same ids" if at is None else f"parts after {at} of {total}"
        row.agrees = f"{same}; {row.agrees}" if row.agrees else same
        if group.precision == "float32":
            why = "in float32 every contender's greedy ids must be the engine's"
            remedy = "its figure is of another model: look at its conversion before comparing it."
            findings.append(Finding.judge(f"same-ids:{row.name}", 0.0 if at is None else total - at, 0, why, remedy))
    return findings


def compare_losses(group: Group) -> list[Finding]:
    """Losses step by step against ours; and ours must fall."""
    ours = next((row for row in group.rows if row.ours and row.measured), None)
    findings = []
    for row in group.rows:
        if ours is None or not row.measured:
            continue
        losses = row.ids[0]
        apart = max(abs(a - b) for a, b in zip(losses, ours.ids[0], strict=False))
        row.agrees = f"loss {losses[0]:.3f} to {losses[-1]:.3f}" + ("" if row is ours else f", {apart:.1e} from ours")
        bound, name = LOSS[group.precision], f"{row.name} {group.setting}"
        why = f"the same weights and batches in {group.precision} must give the same loss at each step"
        remedy = "one of the two does not do the work it is timed for: compare their steps."
        if row is ours:
            fell = losses[-1] - losses[0]
            findings.append(Finding.judge(f"it-learns:{name}", fell, -0.01, "a step that does not learn is no step"))
        else:
            findings.append(Finding.judge(f"same-loss:{name}", apart, bound, why, remedy))
    return findings


def deaths(groups: Sequence[Group]) -> list[Finding]:
    """Each contender that was there and did not finish."""
    return [
        Finding(
            f"alive:{row.name}:{row.precision}", Verdict.FAIL, why=row.died, remedy="run it alone to see all it says."
        )
        for group in groups
        for row in [*group.rows, *([] if group.bandwidth is None else [group.bandwidth])]
        if row.died
    ]


def targets(plan: dict[str, Any], groups: Sequence[Group], plain: Sequence[Row]) -> list[Finding]:
    """The targets that this run speaks about; they were set for GPT-2 small and say nothing of other models."""
    if plan["task"] != "train" and plan["model"].lower() != "gpt2":
        return []
    if plan["task"] == "startup":
        return startup_targets(groups, plain)
    findings = []
    for group in groups:
        findings += _ratio_target(plan, group)
        if plan["task"] == "decode" and plan["batch"] == 1:
            findings += _bandwidth_target(group)
    return findings


def _ratio_target(plan: dict[str, Any], group: Group) -> list[Finding]:
    least = RATIO[plan["task"]].get(group.precision)
    ours, peer = group.ours(), group.best_peer()
    if least is None:
        return []
    what = ":".join(filter(None, ("target", plan["task"], group.precision, group.setting)))
    if plan["task"] == "decode" and plan["batch"] > 1:
        what += f":batch {plan['batch']}"
    if ours is None:
        return [Finding.skip(what, f"we did not run in {group.precision}", "see who died above.")]
    if peer is None:
        return [Finding.skip(what, f"no peer ran in {group.precision}", "install one, see the missing ones above.")]
    if reason := _doubt(group, ours, peer):
        return [Finding.skip(what, reason, QUIET)]
    ratio = group.ratio(ours, peer)
    assert ratio is not None
    why = f"{ours.name} {number(ours.median)}, best peer {peer.name} {number(peer.median)} {group.unit}"
    return [Finding.within(what, ratio, least, None, why, _short(ratio, least))]


QUIET = "measure again on a quiet machine, with more --rounds."


def _doubt(group: Group, ours: Row, peer: Row) -> str:
    """Why a comparison with the best peer means nothing; empty where it does."""
    if few := _too_few(ours, peer):
        return few
    if ours.disturbed:
        return f"{ours.name} was {ours.disturbed}"
    for row in group.rows:  # a disturbed peer may in truth be the best one
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
        return [Finding.skip(what, "either we or the reading of memory did not run", "see who died above.")]
    if reason := _too_few(ours, group.bandwidth) or group.no_share(ours):
        return [Finding.skip(what, reason, QUIET)]
    read = group.bandwidth.best
    why = (
        f"{group.touched / 1e6:,.0f} MB of weights per token, memory read at {read / 1e9:.1f} GB/s: "
        f"at most {read / group.touched:,.0f} tokens/s"
    )
    return [Finding.within(what, share, least, None, why, _short(share, least))]


def startup_targets(groups: Sequence[Group], plain: Sequence[Row]) -> list[Finding]:
    """Our slowest way to a first token against what cannot be avoided."""
    known = {row.name: row for row in plain if row.measured}
    if "import torch" not in known or READING not in known:
        return [Finding.skip("target:startup", "importing torch or reading the file failed", "see who died above.")]
    unavoidable = [known["import torch"], known[READING]]
    floor = sum(row.median for row in unavoidable)
    findings = []
    for group in groups:
        for row in group.rows:
            if row.ours and row.measured:
                why = f"{row.median:.2f} s against {floor:.2f} s for importing torch and reading the file"
                ratio = row.median / floor
                what = f"target:startup:{row.name}:{group.precision}"
                doubt = _too_few(row, *unavoidable) or next(
                    (f"{one.name} was {one.disturbed}" for one in (row, *unavoidable) if one.disturbed), ""
                )
                judged = Finding.judge(what, ratio, STARTUP, why, _over(ratio, STARTUP))
                findings.append(Finding.skip(what, doubt, QUIET) if doubt else judged)
    return findings


def _short(value: float, least: float) -> str:
    return f"missed by {least - value:.3f}."


def _over(value: float, most: float) -> str:
    return f"missed by {value - most:.3f}." if math.isfinite(value) else "not measured."


def sentence(finding: Finding) -> str:
    """A target's verdict as a sentence: reached, missed, or not measured and why."""
    name = finding.id.removeprefix("target:").replace(":", ", ")
    if finding.verdict is Verdict.SKIP:
        return f"{name}: not measured: {finding.why}; {finding.remedy}"
    if finding.passed:
        return f"{name}: reached, {finding.numbers()} ({finding.why})."
    return f"{name}: {finding.remedy.rstrip('.')}, {finding.numbers()} ({finding.why})."
