"""A repeated token shows whether positions are used, near and far."""

from dataclasses import replace

import pytest
import torch

import glassformer as gf
from glassformer.doctor.probes import attention, positions
from glassformer.finding import Verdict
from tests.bugs.styles import time_first, torch_parts, translator
from tests.doctor.probes.subjects import bert, buggy, gpt2, names, rotary, sound, t5, warmed


@pytest.mark.parametrize(("make", "kind"), [(gpt2, "learned"), (rotary, "rotary"), (bert, "learned"), (t5, "t5")])
def test_correct_models_use_their_positions(make, kind):
    constant = positions.repeated_token(make())
    assert positions.scheme(make(), constant) == kind
    assert [f.verdict for f in positions.positions_are_used(make(), constant)] == [Verdict.PASS]
    assert constant.absolute is (kind == "learned")


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "id",
    ["position_never_added", "position_clamped_at_64", "position_by_row", "position_row_zeroed", "rotary_never_applied",
     "alibi_never_added"],
)  # fmt: skip
def test_positions_that_do_not_arrive_are_found(id):
    subject = buggy(id)
    assert names(positions.positions_are_used(subject, positions.repeated_token(subject))) == {"position_missing"}


@pytest.mark.parametrize(
    ("style", "bug", "found"),
    [
        (translator, "source_without_positions", {"position_missing"}),
        (time_first, "positions_forgotten", {"position_missing"}),
        (torch_parts, "positions_by_row", {"position_missing"}),
        (torch_parts, "positions_clamped", {"position_missing"}),
        (translator, None, set()),
        (time_first, None, set()),
        (torch_parts, None, set()),
    ],
)
def test_sources_tables_that_are_not_used_and_streams_with_time_first_are_examined(style, bug, found):
    subject = warmed(style.build(bug), kind="seq2seq" if style is translator else "decoder")
    assert names(positions.positions_are_used(subject, positions.repeated_token(subject))) == found


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


def heads_at(scores, capped):
    (one, *_) = attention.traced(rotary())
    return replace(one, scores=scores, attention=replace(one.attention, capped=capped))


def test_scores_at_their_soft_cap_say_nothing_about_positions():
    one = attention.traced(rotary())[0]
    scores = one.scores.clone()
    scores[:, 0] = torch.where(scores[:, 0] < -1e6, scores[:, 0], scores.abs()[scores.abs() < 1e6].max())
    assert bool((positions.spread(heads_at(scores, False))[0] == 0).all())
    assert bool((positions.spread(heads_at(scores, True))[0] > 0).all())


@pytest.mark.parametrize("declared", [True, False])
def test_a_layer_without_positions_is_a_design_where_it_is_declared(declared):
    kinds = (gf.config.LayerKind((1,), position=gf.config.NoPosition()),)
    model = gf.build(gf.config.replace(rotary().model.config, layer_kinds=kinds), seed=0)
    if not declared:
        model.config = rotary().model.config
    subject = warmed(model)
    found = positions.positions_are_used(subject, positions.repeated_token(subject))
    assert names(found) == (set() if declared else {"position_missing"})


@pytest.mark.parametrize(
    ("without", "design"),
    [
        ((1, 3), True),
        ((3, 7), True),
        ((2, 3, 6, 7), True),
        ((1,), False),
        ((3,), False),
        ((2, 7), False),
        ((1, 2), False),
    ],
)
def test_layers_without_positions_are_a_design_where_they_repeat_a_pattern(without, design):
    size = 8 if max(without) > 3 else 4
    assert positions.regular([i in without for i in range(size)]) == design


def test_undeclared_layers_without_positions_in_a_regular_order_are_noted():
    config = gf.config.replace(rotary().model.config, n_layers=4)
    for layers, verdict in (((1, 3), Verdict.SKIP), ((1, 2), Verdict.FAIL)):
        kinds = (gf.config.LayerKind(layers, position=gf.config.NoPosition()),)
        model = gf.build(gf.config.replace(config, layer_kinds=kinds), seed=0)
        model.config = config
        subject = warmed(model)
        (finding,) = positions.positions_are_used(subject, positions.repeated_token(subject))
        assert finding.verdict is verdict


def test_a_layer_without_positions_is_not_all_of_them_where_another_cannot_be_judged(monkeypatch):
    constant = positions.repeated_token(rotary())
    constant.seen = constant.seen[:2]
    monkeypatch.setattr(positions, "spread", lambda one: torch.zeros(one.scores.shape[1], 4))
    monkeypatch.setattr(positions, "_rotated_but_flat", lambda flat: None)
    subject = rotary()
    subject.interface.library = True
    (finding,) = positions.positions_are_used(subject, constant)
    assert finding.verdict is Verdict.FAIL
    constant.unsteady = {id(constant.seen[1])}
    (finding,) = positions.positions_are_used(subject, constant)
    assert finding.verdict is Verdict.SKIP
