"""The future cannot change the past: by perturbation, in eval and train mode, with and without a mask."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from glassformer.doctor.subject.isolate import NoDropout
from glassformer.doctor.subject.measure import SAME_WHY, gap, same_shape_bound
from glassformer.doctor.subject.rounding import Measured, first_over, judge, untouched
from glassformer.doctor.subject.snapshot import seed_torch
from glassformer.doctor.subject.subject import Subject, layer_of
from glassformer.finding import Finding, Verdict
from glassformer.shapes import Float

CUTS = (0, 3, 10, 22, 37, 70, 101)
"""Not multiples of a power of two: a leak inside blocks of 16 or 64 does not cross their borders."""
REMEDY = (
    "A position attends to later tokens. Apply the mask before softmax in every path (train, eval, fused, windowed, "
    "with a padding mask), and keep everything else token-wise."
)


WATCHED = (
    "with attentions returned the future is seen: the library's fast path makes no mask, and its slow one needs it; "
    "look at attention maps with its eager implementation only"
)


def future_token(subject: Subject) -> Iterator[Finding]:
    """Replace the tokens after t: the logits up to t must not move."""
    prefix = declared_prefix(subject)

    def measure(isolated: Subject) -> Measured:
        found = []
        for length in isolated.lengths():
            rows = 3 if length == 24 and not isolated.large else 1
            found += list(moved_by_future(isolated, rows, length, prefix))
        return first_over(found)

    yield judge(subject, "causal_leak/future-token", measure, REMEDY)

    def in_training(isolated: Subject) -> Measured:
        with NoDropout():
            lengths = [t for t in isolated.lengths() if t >= 24] or isolated.lengths()
            lengths = lengths[:1] if isolated.large else lengths[:2]
            return first_over(
                [m for t in lengths for m in moved_by_future(isolated, isolated.rows(3 if t == 24 else 2), t, prefix)]
            )

    yield judge(subject, "causal_leak/train-mode", in_training, REMEDY, train=True)
    if subject.interface.mask is not None:

        def masked(isolated: Subject) -> Measured:
            length = isolated.length(24)
            rows = isolated.rows(3)
            ones = torch.ones(rows, length, dtype=torch.bool, device=isolated.device)
            return first_over(list(moved_by_future(isolated, rows, length, prefix, mask=ones)))

        yield judge(subject, "causal_leak/with-mask", masked, REMEDY)
    if subject.interface.attentions is not None:
        name = subject.interface.attentions

        def watched(isolated: Subject) -> Measured:
            given: dict[str, Any] = {name: True}
            return first_over(list(moved_by_future(isolated, 1, isolated.length(24), prefix, **given)))

        finding = judge(subject, "causal_leak/attentions-returned", watched, REMEDY)
        if finding.verdict is Verdict.FAIL and subject.interface.library:
            # its fast attention builds no mask and its slow one, taken here, needs it: real, and met by no plain call
            evidence = {**finding.evidence, "explained": True}
            finding = replace(finding, verdict=Verdict.SKIP, why=WATCHED, remedy="", evidence=evidence)
        yield finding


def declared_prefix(subject: Subject) -> int:
    """How many first tokens may see one another."""
    length = next((value for key, value in subject.expect.items() if key.startswith("prefix")), 0)
    return int(length) if isinstance(length, int | float | str) and str(length).isdigit() else 0


def moved_by_future(
    isolated: Subject, rows: int, length: int, prefix: int, cuts: tuple[int, ...] = (), **given: Any
) -> Iterator[Measured]:
    """Tokens after each cut replaced, all of them and the next alone: how far the logits up to the cut move."""
    tokens = isolated.tokens(rows, length, seed=length)
    other = isolated.other(tokens)
    base = _seeded(isolated, tokens, **given)
    few = bool(cuts) or isolated.large
    cuts = cuts or ((3, 37, length - 2) if isolated.large else (*CUTS, length - 2))
    for cut in [c for c in cuts if prefix <= c < length - 1]:
        if length > 24 and cut < 10:
            continue
        changed = tokens.clone()
        changed[:, cut + 1 :] = other[:, cut + 1 :]
        moved = _seeded(isolated, changed, **given)
        where = {"cut": cut, "length": length, "rows": rows}
        yield untouched(base[:, : cut + 1], moved[:, : cut + 1], SAME_WHY, **where)
        if length == 24 and cut + 2 < length and not few:
            changed = tokens.clone()
            changed[:, cut + 1] = other[:, cut + 1]
            moved = _seeded(isolated, changed, **given)
            yield untouched(base[:, : cut + 1], moved[:, : cut + 1], SAME_WHY, only=cut + 1, **where)


def _seeded(isolated: Subject, tokens: Tensor, **given: Any) -> Tensor:
    """The same random numbers in every call: training draws some beyond dropout (layers left out, noise of routers)."""
    seed_torch()
    return isolated.logits(tokens, **given)


def leak_matrix(isolated: Subject, length: int = 12) -> Float[Tensor, "T T"]:
    """How far output i moves when input j alone is replaced; above the diagonal lies the future."""
    tokens = isolated.tokens(1, length, seed=3)
    other = isolated.other(tokens)
    base = isolated.logits(tokens)
    columns = []
    for j in range(length):
        changed = tokens.clone()
        changed[:, j] = other[:, j]
        columns.append((isolated.logits(changed) - base).abs().amax(dim=(0, 2)))
    return torch.stack(columns, dim=1)


def first_leaking_block(
    subject: Subject, train: bool = False, warm: float = 1.0, length: int = 24, cut: int = 10
) -> str | None:
    """Bisection over the layers: the first block whose output before the cut moves when the tokens after it change."""
    blocks = subject.blocks()
    if not blocks or subject.kind == "encoder":
        return None
    with subject.isolated(warm, train=train) as isolated, NoDropout():
        length = isolated.length(length)
        cut = min(cut, length - 2)
        tokens = isolated.tokens(2, length, seed=length)
        changed = tokens.clone()
        changed[:, cut + 1 :] = isolated.other(tokens)[:, cut + 1 :]
        one, two = block_outputs(isolated, tokens), block_outputs(isolated, changed)
    for name in blocks:
        a, b = one.get(name), two.get(name)
        if a is None or b is None or a.dim() != 3 or a.shape[1] != length:
            continue
        if gap(a[:, : cut + 1], b[:, : cut + 1]) > same_shape_bound(a):
            return name
    return None


def block_outputs(isolated: Subject, tokens: Tensor, **given: Any) -> dict[str, Tensor]:
    """The output of each layer in one call; the last one where a layer is used several times."""
    found: dict[str, Tensor] = {}
    handles = []
    for name, block in isolated.blocks().items():

        def keep(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
            first = output[0] if isinstance(output, tuple | list) else output
            if isinstance(first, Tensor):
                found[name] = first.detach().clone()

        handles.append(block.register_forward_hook(keep))
    try:
        isolated.call(tokens, **given)
    finally:
        for handle in handles:
            handle.remove()
    return found


def layer_number(name: str | None, subject: Subject) -> int | None:
    """The number of a layer in its stack."""
    found = layer_of(name, subject.blocks()) if name else None
    return None if found is None else found[1]
