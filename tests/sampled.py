"""Less of the same in the default suite: cases of a parametrised test, and examples of hypothesis.

`@pytest.mark.sample(n)`: the default suite runs n cases of a parametrised test, `make test-all` runs all of them. The
n cases are the same in every run. Each value of each parameter is among them, as far as n cases can have all values;
the rest are drawn by a seed made from the name of the test. The cases that are not drawn are marked `slow`.
"""

import random
from collections.abc import Iterable

import pytest

thorough = False
"""Whether the slow tests run too; set before test modules are imported."""


def examples(all_of_them: int) -> int:
    """Number of examples that hypothesis tries: a third, or all of them where the slow tests run too."""
    return all_of_them if thorough else max(all_of_them // 3, 10)


def mark_the_rest(items: Iterable[pytest.Item]) -> None:
    """Mark those cases `slow` that the samples of the default suite leave out."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample") is not None and item.get_closest_marker("slow") is None:
            cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    for name, found in cases.items():
        (count,) = found[0].get_closest_marker("sample").args
        kept = draw([set(item.callspec.indices.items()) for item in found], count, seed=name)
        for i, item in enumerate(found):
            if i not in kept:
                item.add_marker("slow")


def draw(cases: list[set[tuple[str, int]]], count: int, seed: str) -> set[int]:
    """Draw `count` indices of `cases`, each next one with as many values as possible that no earlier one has."""
    order = list(range(len(cases)))
    random.Random(seed).shuffle(order)
    kept: set[int] = set()
    covered: set[tuple[str, int]] = set()
    while order and len(kept) < count:
        best = max(order, key=lambda i: len(cases[i] - covered))
        order.remove(best)
        kept.add(best)
        covered |= cases[best]
    return kept
