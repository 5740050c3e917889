"""Two models at one place, without the search for it."""

import torch

from glassformer.anatomy.parts import Lengths, read_anatomy
from glassformer.anatomy.record import record
from glassformer.anatomy.roles import differences, roles_of
from glassformer.doctor.compare.scene import Scene
from glassformer.doctor.subject.adapt import subject_of
from tests.doctor.compare.pairs import V


def parts_of(model, length=13):
    tokens = torch.randint(3, V, (2, length), generator=torch.Generator().manual_seed(0))
    subject = subject_of(model)
    graph, logits = record(lambda: subject.logits(tokens), [tokens], model)
    return read_anatomy(graph, Lengths(2, length), logits)


def scene(a, b, name):
    """Both models at a place, in float64."""
    parts = parts_of(a.double()), parts_of(b.double())
    one, two = (roles_of(p) for p in parts)
    return Scene(one[name], two[name], differences(one[name], two[name]), parts)
