"""Places are compared in what the rest of the model can notice, and a difference without consequence is absolved."""

import torch

from glassformer.anatomy.roles import differences, roles_of, walk_roles
from tests.doctor.compare.pairs import ours, theirs
from tests.doctor.compare.scenes import parts_of


def roles(model):
    return roles_of(parts_of(model.double()))


def test_both_writings_have_the_same_places_in_an_order_that_respects_what_they_read():
    one, two = roles(theirs("gpt2")), roles(ours("gpt2"))
    assert list(one) == list(two)
    assert {"tokens", "embed", "blocks.1.attention.scores", "blocks.1.feedforward.post", "final", "logits"} <= set(one)
    seen = set()
    for name, role in one.items():
        assert set(role.after) <= seen, name
        seen.add(name)


def test_places_of_equal_weights_agree():
    one, two = roles(theirs("gpt2")), roles(ours("gpt2"))
    assert max(differences(one[n], two[n]) for n in one) < 1e-12


def test_a_factor_on_queries_is_no_difference_and_on_scores_it_is():
    one, two = roles(ours("gpt2")), roles(ours("gpt2"))
    two["blocks.0.attention.q"].value = two["blocks.0.attention.q"].value * 3
    two["blocks.0.attention.scores"].value = two["blocks.0.attention.scores"].value * 3
    assert differences(one["blocks.0.attention.q"], two["blocks.0.attention.q"]) < 1e-12
    assert differences(one["blocks.0.attention.scores"], two["blocks.0.attention.scores"]) > 0.1


def test_a_constant_per_row_of_scores_is_no_difference():
    one, two = roles(ours("gpt2")), roles(ours("gpt2"))
    scores = two["blocks.0.attention.scores"]
    scores.value = scores.value + torch.arange(13.0, dtype=torch.float64)[:, None]
    assert differences(one["blocks.0.attention.scores"], scores) < 1e-12


def test_padding_is_left_out_as_a_query_and_not_as_a_key():
    one, two = roles(ours("gpt2")), roles(ours("gpt2"))
    real = torch.ones(2, 13, dtype=torch.bool)
    real[1, 0] = False
    name = "blocks.0.attention.pattern"
    two[name].value = two[name].value.clone()
    two[name].value[1, :, 0] = 7.0
    assert differences(one[name], two[name], real) == 0
    two[name].value[1, :, 5, 0] = 7.0
    assert differences(one[name], two[name], real) > 1


def test_a_difference_that_nothing_downstream_shows_is_absolved():
    one, two = roles(ours("gpt2")), roles(ours("gpt2"))
    for name in ("blocks.0.attention.projected_q", "blocks.0.attention.q", "blocks.0.feedforward.post"):
        two[name].value = two[name].value.flip(-1)
    for name in list(two)[list(two).index("blocks.0.feedforward.out") :]:
        two[name].value = two[name].value.flip(-1)
    steps = {s.name: s for s in walk_roles(one, two, lambda _: 1e-9, None)}
    assert steps["blocks.0.attention.projected_q"].absolved
    assert steps["blocks.0.attention.q"].absolved
    assert not steps["blocks.0.feedforward.post"].absolved
    assert next(s.name for s in steps.values() if s.differs and not s.absolved) == "blocks.0.feedforward.post"
