"""A place is explained by a convention only if that turns one output into the other."""

import torch

from glassformer.anatomy.roles import roles_of
from glassformer.doctor.compare.explain import BY_KIND, explain
from tests.doctor.compare.pairs import ours, theirs
from tests.doctor.compare.scenes import parts_of, scene


def test_every_kind_of_place_has_its_explanations():
    assert {role.kind for role in roles_of(parts_of(ours("llama").double())).values()} <= BY_KIND.keys()


def test_noise_is_not_explained_at_any_place():
    made = scene(theirs("gpt2"), ours("gpt2"), "logits")
    roles = roles_of(made.parts[1])
    for name, role in roles_of(made.parts[0]).items():
        if role.kind in ("mask", "tokens"):
            continue  # any pattern can be named, and a table that is another is another
        other = roles[name]
        noise = torch.rand(other.value.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        other.value = other.value + noise
        other.pieces = [p + 1 for p in other.pieces]
        made.a, made.b, made.difference = role, other, 1.0
        assert explain(made).convention == "unknown", (name, explain(made))


def test_other_shapes_are_reported():
    made = scene(ours("gpt2"), ours("gpt2"), "embed")
    made.b.value = made.b.value[..., :5]
    assert explain(made).convention == "shape"
    assert "(2, 13, 24) in A and (2, 13, 5) in B" in explain(made).text
