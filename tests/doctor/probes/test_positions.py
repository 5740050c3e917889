"""A repeated token shows whether positions are used, near and far."""

import pytest

from glassformer.doctor.probes import positions
from glassformer.finding import Verdict
from tests.doctor.probes.subjects import bert, buggy, gpt2, names, rotary, sound, t5, warmed


@pytest.mark.parametrize(("make", "kind"), [(gpt2, "learned"), (rotary, "rotary"), (bert, "learned"), (t5, "t5")])
def test_correct_models_use_their_positions(make, kind):
    constant = positions.repeated_token(make())
    assert positions.scheme(make(), constant) == kind
    assert [f.verdict for f in positions.positions_are_used(make(), constant)] == [Verdict.PASS]
    assert constant.absolute is (kind == "learned")


@pytest.mark.parametrize(
    "id",
    ["position_never_added", "position_clamped_at_64", "position_by_row", "position_row_zeroed", "rotary_never_applied",
     "alibi_never_added"],
)  # fmt: skip
def test_positions_that_do_not_arrive_are_found(id):
    subject = buggy(id)
    assert names(positions.positions_are_used(subject, positions.repeated_token(subject))) == {"position_missing"}


def test_no_positions_is_a_legitimate_design():
    from tests.bugs.healthy import WARD

    nope = warmed(next(h for h in WARD if h.id == "base-nope").build())
    (finding,) = positions.positions_are_used(nope, positions.repeated_token(nope))
    assert finding.verdict is Verdict.SKIP


def test_layers_that_are_declared_to_go_without_positions_may():
    model = sound("opposite_turns").model
    attention = model.blocks[1].attention

    class Unturned(type(attention)):
        def rotate(self, q, k, v, positions):
            return q, k, v

    attention.__class__ = Unturned
    for expect, found in (({}, {"position_missing"}), ({"no_rope_layers": [1]}, set())):
        subject = warmed(model, expect=expect)
        assert names(positions.positions_are_used(subject, positions.repeated_token(subject))) == found
