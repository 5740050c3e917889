import itertools

import pytest

from glassformer.training.run import Schedule
from glassformer.training.schedule import factor


@pytest.mark.parametrize("kind", ["constant", "cosine", "wsd"])
def test_warm_up_is_a_straight_line_to_one(kind):
    schedule = Schedule(kind=kind, warmup=4)
    assert [factor(schedule, s, 100) for s in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


@pytest.mark.parametrize(("kind", "end"), [("constant", 1.0), ("cosine", 0.1), ("wsd", 0.1)])
def test_the_last_step_is_at_the_floor(kind, end):
    schedule = Schedule(kind=kind, warmup=10, floor=0.1)
    assert factor(schedule, 99, 100) == pytest.approx(end)
    factors = [factor(schedule, s, 100) for s in range(10, 100)]
    assert all(a >= b for a, b in itertools.pairwise(factors))


def test_cosine_is_half_way_in_the_middle():
    assert factor(Schedule(kind="cosine", warmup=0, floor=0.0), 50, 101) == pytest.approx(0.5)


def test_wsd_stays_until_its_decay():
    schedule = Schedule(kind="wsd", warmup=10, floor=0.0, decay=0.2)
    assert all(factor(schedule, s, 100) == 1.0 for s in range(10, 81))
    assert factor(schedule, 99, 100) == 0.0
    assert factor(schedule, 90, 101) == pytest.approx(1 - 9 / 19)


@pytest.mark.parametrize("kind", ["constant", "cosine", "wsd"])
def test_a_run_of_one_step_works(kind):
    assert 0 <= factor(Schedule(kind=kind, warmup=0), 0, 1) <= 1
