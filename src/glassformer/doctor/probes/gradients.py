"""Every trainable parameter gets a gradient, except those that cannot have one."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from glassformer.anatomy.record import storage_of
from glassformer.doctor.probes.attention import traced
from glassformer.doctor.probes.norms import is_norm
from glassformer.doctor.probes.step import vectors
from glassformer.doctor.probes.unreached import explain
from glassformer.doctor.subject.measure import gap, many, rms
from glassformer.doctor.subject.subject import Subject, layer_of
from glassformer.doctor.subject.trace import trace_call
from glassformer.finding import Finding, Verdict

DEAD = 1e-9
"""Of the median gradient: exact cancellation leaves rounding, anything that is used leaves more."""
KEYS = ("k", "key", "k_proj", "k_lin", "wk", "key_proj", "to_k", "w_k", "keys")


_Rows = tuple[str, int, int, int]
"""Rows of a parameter: its name, the first and the last of them, and how many it has."""


def _excused(name: str) -> bool:
    """Key biases cancel in softmax unless keys are rotated."""
    parts = name.lower().split(".")
    key = any(part == k or part.endswith("_" + k) for part in parts for k in KEYS if len(k) > 1 or part == k)
    return (parts[-1] in ("bias", "b") and key) or parts[-1] in ("k_bias", "bk", "b_k")


@dataclass
class _Gradients:
    """What one backward pass left: the largest entry of each parameter's gradient, and rows that got none."""

    sizes: dict[str, float]
    blocks: list[_Rows]
    owners: dict[str, nn.Module]

    def dead(self) -> list[str]:
        """Parameters without a gradient, of those that can have one."""
        typical = sorted(self.sizes.values())[len(self.sizes) // 2] if self.sizes else 0.0
        return [n for n, size in self.sizes.items() if size <= DEAD * typical and not _excused(n)]


def reach_every_parameter(subject: Subject) -> Iterator[Finding]:
    """Every parameter gets a gradient, those that these inputs do not reach from other inputs."""
    id = "dead_gradient/flow"
    if subject.module is None:
        yield Finding.skip(id, "not a module")
        return
    got = _backward(subject)
    if got is None:
        why, remedy = "logits carry no gradient at all", "Do not detach or run under no_grad in forward."
        yield Finding(id, Verdict.FAIL, 0.0, None, why, remedy)
        return
    dead = got.dead()
    reasons = explain(subject, dead) if dead else {}
    if reasons:
        first = next(iter(reasons))
        more = f" and {len(reasons) - 1} more" if len(reasons) > 1 else ""
        why = f"{first}{more} get no gradient from these inputs: {'; '.join(dict.fromkeys(reasons.values()))}"
        evidence = {"explained": True, "parameters": list(reasons)[:20]}
        yield Finding("dead_gradient/other-inputs", Verdict.SKIP, float(len(reasons)), 0.0, why, "", evidence)
    cut = [n for n in dead if n not in reasons]
    if cut:
        yield _name(subject, cut, got.owners)
    elif got.blocks:
        yield _name_block(subject, got.blocks)
    else:
        which = "every parameter that these inputs reach" if reasons else f"each of {many(len(got.sizes), 'parameter')}"
        yield Finding(id, Verdict.PASS, 0.0, 0.0, f"{which} gets a gradient")


def _backward(subject: Subject) -> _Gradients | None:
    """Backward of a random projection of all logits, every weight stirred a little: a zero one hides what is behind.

    None: the logits carry no gradient.
    """
    with subject.isolated(own=True) as isolated, torch.enable_grad():
        module = isolated.module
        assert module is not None
        stir = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.is_floating_point():
                    parameter.add_(0.02 * torch.randn(parameter.shape, generator=stir).to(parameter))
        logits = isolated.logits(isolated.tokens(isolated.rows(3), isolated.length(24), seed=29))
        if not logits.requires_grad:
            return None
        (logits * torch.randn(logits.shape, generator=stir).to(logits)).sum().backward()
        sizes = {
            n: 0.0 if p.grad is None else float(p.grad.abs().max())
            for n, p in module.named_parameters()
            if p.requires_grad
        }
        blocks = _dead_blocks(isolated, module)
        if blocks:  # rows that more distant positions use are no fault: a longer input reaches more of them
            longer = isolated.logits(isolated.tokens(1, isolated.lengths()[-1], seed=30))
            (longer * torch.randn(longer.shape, generator=stir).to(longer)).sum().backward()
            still = _dead_blocks(isolated, module)
            blocks = [block for block in blocks if block in still]
        owners = {
            f"{path}.{n}" if path else n: owner
            for path, owner in module.named_modules()
            for n, _ in owner.named_parameters(recurse=False)
        }
    return _Gradients(sizes, blocks, owners)


def _dead_blocks(isolated: Subject, module: nn.Module) -> list[_Rows]:
    """(name, first, last, of) of rows of a projection that get exactly no gradient: parts of a fused matrix.

    A projection's rows are its outputs. A block at least as wide as a head is unused; fewer rows may be units that a
    ReLU switches off. The head is left out: a padded vocabulary may be cut off.
    """
    width = isolated.facts.head_width or 8
    trace = trace_call(isolated, isolated.tokens(1, isolated.length(8), seed=29))
    wide = {linear.weight: linear.output.shape[-1] for linear in trace.linears}
    found = []
    for name, weight in module.named_parameters():
        outputs = wide.get(storage_of(weight))
        if weight.dim() != 2 or weight.grad is None or outputs not in weight.shape or outputs == isolated.vocab_size:
            continue
        if weight.shape[0] == weight.shape[1] or _excused(name):
            continue  # a square matrix is no fusion of several
        sizes = weight.grad.abs().amax(1 if weight.shape[0] == outputs else 0)
        run = _longest_run((sizes == 0).nonzero().flatten().tolist())
        if width <= len(run) < len(sizes):
            found.append((name, run[0], run[-1], len(sizes)))
    return found


def _longest_run(numbers: list[int]) -> list[int]:
    """The longest stretch of consecutive numbers."""
    best: list[int] = []
    now: list[int] = []
    for number in numbers:
        now = [*now, number] if now and number == now[-1] + 1 else [number]
        best = now if len(now) > len(best) else best
    return best


def _name_block(subject: Subject, blocks: list[_Rows]) -> Finding:
    name, first, last, size = blocks[0]
    at = layer_of(name, subject.blocks())
    more = f" (and of {len(blocks) - 1} more)" if len(blocks) > 1 else ""
    shared = _values_from_keys(subject)
    cause = f"; {shared}" if shared else ""
    why = f"outputs {first} to {last} of the {size} of {name}{more} get no gradient: they are computed and not used"
    remedy = "Use every part of the fused projection (q, k and v in their order), or make it smaller."
    evidence = {"parameters": [b[0] for b in blocks[:20]], "rows": [first, last], "layer": at[1] if at else None}
    return Finding(
        "dead_gradient/fused",
        Verdict.FAIL,
        float(last - first + 1),
        0.0,
        why + cause,
        VALUES if shared else remedy,
        evidence,
    )


VALUES = "Compute v with its own projection, or remove that projection if keys and values are meant to be shared."


def _values_from_keys(subject: Subject) -> str | None:
    """Attention whose v is k, number by number: reported where a projection of values exists and is not used."""
    with contextlib.suppress(Exception):
        for one in traced(subject):
            found = vectors(one.attention, 2)
            if found is not None and _proportional(found[1], found[2]):
                return f"in {one.location} the values are the keys"
            maps = one.attention.v_maps
            if maps and found is not None and len(one.attention.maps) > 1 and maps <= one.attention.maps:
                return f"in {one.location} the values come from the projection of the queries or keys"
    return None


def _proportional(a: Tensor, b: Tensor) -> bool:
    """Equal up to one factor: a scale may be folded into the keys."""
    return a.shape == b.shape and gap(a * (rms(b) / max(rms(a), 1e-30)), b) <= 1e-4 * rms(b)


def _is_position_table(subject: Subject, name: str) -> bool:
    """One row per position: as many as the declared length, or a few more."""
    assert subject.module is not None
    shape, length = subject.module.get_parameter(name).shape, subject.facts.whole("max_len")
    return length is not None and len(shape) == 2 and 0 <= shape[0] - length <= 4 and shape[0] != subject.vocab_size


NORM_WORDS = re.compile(r"norm|(^|[._])(ln|rms)")


def _of_norm(subject: Subject, name: str, owner: nn.Module) -> bool:
    """Whether a parameter is a gain or shift of a norm: by its module, else a vector by its name or its constant value.

    A gain that training has not moved is all ones. A shift of zeros may be a bias as well, so that its name decides.
    """
    if is_norm(owner):
        return True
    assert subject.module is not None
    value = subject.module.get_parameter(name)
    if value.dim() != 1 or value.numel() < 2:
        return False
    return bool(NORM_WORDS.search(name.lower())) or bool((value == 1).all())


def _name(subject: Subject, dead: list[str], owners: dict[str, nn.Module]) -> Finding:
    at = layer_of(dead[0], subject.blocks())
    shown = ", ".join(dead[:4]) + (f" and {len(dead) - 4} more" if len(dead) > 4 else "")
    evidence = {"parameters": dead[:20], "layer": at[1] if at else None}
    positional = [
        n for n in dead if any(w in n.lower() for w in ("pos", "wpe", "relative")) or _is_position_table(subject, n)
    ]
    if positional and len(positional) == len(dead):
        why, remedy = (
            f"{shown} gets no gradient: the position embedding is never added",
            "Add the position rows to the token rows.",
        )
        return Finding("position_missing/gradient", Verdict.FAIL, float(len(dead)), 0.0, why, remedy, evidence)
    if all(_of_norm(subject, n, owners[n]) for n in dead):
        why, remedy = (
            f"{shown} {'gets' if len(dead) == 1 else 'get'} no gradient: this norm's output is not used",
            "Use the norm where the design has it; the final one before the head.",
        )
        return Finding("norm_placement/unused-norm", Verdict.FAIL, float(len(dead)), 0.0, why, remedy, evidence)
    get = "gets" if len(dead) == 1 else "get"
    shared = _values_from_keys(subject)
    if shared is not None:
        why = f"{shown} {get} no gradient: {shared}"
        return Finding("dead_gradient/flow", Verdict.FAIL, float(len(dead)), 0.0, why, VALUES, evidence)
    why = f"{shown} {get} no gradient: detached, multiplied by 0, unused, or behind argmax"
    remedy = "Find where the path from these parameters to the logits ends: detach(), .data, no_grad, an unused result."
    return Finding("dead_gradient/flow", Verdict.FAIL, float(len(dead)), 0.0, why, remedy, evidence)
