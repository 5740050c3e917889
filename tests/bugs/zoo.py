"""The bug zoo: models broken in one known way each, for every diagnosis of the taxonomy.

for bug in ZOO:
    model = bug.build()          # sick
    twin = bug.healthy()         # the same without the bug
    bug.diagnosis, bug.layer     # what the doctor should say
"""

from tests.bugs import (
    zoo_arithmetic,
    zoo_attention,
    zoo_cache,
    zoo_decoding,
    zoo_padding,
    zoo_position,
    zoo_structure,
    zoo_training,
    zoo_weights,
)
from tests.bugs.bug import TAXONOMY, Bug

__all__ = ["TAXONOMY", "ZOO", "Bug", "by_id"]

ROOMS = (
    *(zoo_attention, zoo_arithmetic, zoo_cache, zoo_decoding),
    *(zoo_position, zoo_padding, zoo_training, zoo_weights, zoo_structure),
)
ZOO: tuple[Bug, ...] = tuple(bug for room in ROOMS for bug in room.BUGS)


def by_id(id: str) -> Bug:
    return next(bug for bug in ZOO if bug.id == id)
