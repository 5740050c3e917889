"""Up to which length a model is continuous: sparse attention that keeps the k best keys is not, beyond k of them.

A selection of keys by top-k jumps where two scores are close, and scores that are equal (ReLU gives many zeros) are
ordered differently for other lengths. A comparison between lengths (cache, padding) then shows the jumps, not a bug.
Up to k keys all are kept, and the comparison holds. So it is with experts that take a number of tokens and drop the
others: what is dropped depends on the whole input.
"""

import contextlib

from glassformer.doctor.subject.isolate import quiet
from glassformer.doctor.subject.subject import Subject
from glassformer.doctor.subject.trace import trace_call

ROWS = 4
"""Sequences of a batch that may share the capacity of an expert."""


def continuous_length(subject: Subject) -> int | None:
    """The longest input of which every key and every token is kept; None where nothing is selected by position."""
    capacity = subject.facts.whole("capacity")
    if capacity is not None and capacity >= 4 * ROWS:
        return capacity // ROWS
    with contextlib.suppress(Exception), quiet():
        short, long = subject.length(23), subject.lengths()[-1]
        few = _selections(subject, short)
        if not few or long <= short:
            return None
        found = []
        for (size, _), (longer, kept) in zip(few, _selections(subject, long), strict=False):
            # a size that grows with the input counts positions (or blocks of them); experts do not grow
            if longer > size and kept < longer:
                found.append(max(1, kept * long // longer))
        return min(found, default=None)
    return None


def _selections(subject: Subject, length: int) -> list[tuple[int, int]]:
    with subject.isolated() as isolated:
        return trace_call(isolated, isolated.tokens(1, length, seed=5)).selections
