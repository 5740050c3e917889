"""A row's logits do not depend on its neighbours, nor on where in the batch it stands."""

from collections.abc import Iterator

import torch

from glassformer.doctor.probes.padding import amounts, pad_fill, padded
from glassformer.doctor.subject.measure import CROSS_WHY, SAME_WHY, cross_shape_bound, gap
from glassformer.doctor.subject.rounding import Measured, judge, prefix_noise, untouched, worst
from glassformer.doctor.subject.subject import Subject
from glassformer.finding import Finding

REMEDY = (
    "Something is shared by the rows of a batch: statistics, a mask, positions or a state. Keep everything per row."
)


def batch_invariance(subject: Subject) -> Iterator[Finding]:
    """Change a neighbour; look at each row alone; with mixed padding too."""
    if subject.facts.capacity is not None:
        yield Finding.skip(
            "batch_variance/neighbour", "experts with a capacity: sequences compete for capacity by design"
        )
        return

    def neighbour(isolated: Subject) -> Measured:
        tokens = isolated.tokens(3, isolated.length(24, if_large=13), seed=2)
        base, found = isolated.logits(tokens), []
        for row in range(3):
            changed = tokens.clone()
            others = [r for r in range(3) if r != row]
            changed[others] = isolated.other(tokens)[others]
            found.append(untouched(base[row], isolated.logits(changed)[row], SAME_WHY, row=row))
        return worst(found)

    yield judge(subject, "batch_variance/neighbour", neighbour, REMEDY)

    def alone(isolated: Subject) -> Measured:
        tokens = isolated.tokens(3, isolated.length(24, if_large=13), seed=2)
        sources = isolated.source(3) if isolated.kind == "seq2seq" else None
        together, found = isolated.logits(tokens), []
        for row in range(3):
            given = {} if sources is None else {"source": sources[row : row + 1]}
            one = isolated.logits(tokens[row : row + 1], **given)
            bound = cross_shape_bound(one, prefix_noise(isolated, tokens[row : row + 1], one, **given))
            found.append(Measured(gap(one, together[row : row + 1]), bound, CROSS_WHY, {"row": row}))
        return worst(found)

    yield judge(subject, "batch_variance/alone", alone, REMEDY)
    if subject.interface.mask is not None:

        def mixed(isolated: Subject) -> Measured:
            found = []
            for side in ("left", "right"):
                length, counts = isolated.length(19, if_large=12), amounts(isolated, 0, 3, 8)
                batch = padded(isolated, length, counts, side, pad_fill(isolated))
                base = isolated.logits(batch.tokens, mask=batch.mask)
                changed = batch.tokens.clone()
                other = isolated.other(batch.tokens)
                changed[0] = torch.where(batch.mask[0], other[0], changed[0])
                moved = isolated.logits(changed, mask=batch.mask)
                found += [
                    untouched(batch.real(base, b), batch.real(moved, b), SAME_WHY, row=b, side=side) for b in (1, 2)
                ]
            return worst(found)

        yield judge(subject, "batch_variance/mixed-padding", mixed, REMEDY)
