"""Windows by layer: what the layers' own modules say where the config says one number for all, or nothing.

A layer that keeps `window = None` next to one that keeps the declared number has full attention by design. So have
layers that alternate with windowed ones in a regular order, which no forgotten argument gives.
"""

import re
from itertools import pairwise

from torch import nn

from glassformer.doctor.subject.subject import Subject, layer_of

WORDS = re.compile(
    r"^(is_|use_|has_)?(sliding|local|global)(_window|_attention|_attn|_layer)?(_size|_len|_length)?$"
    r"|^(attn_|attention_|local_|is_|use_|has_)?(window|windowed|span)(_size|_len|_length)?$"
)
"""Whole names: a number of kept keys (`keep_window_size`) or a pattern of layers is no window."""


def own_windows(subject: Subject) -> dict[tuple[str, int], int | None]:
    """(stack, layer) -> the window that the modules of this layer keep, None for an attribute that says there is none.

    Empty where no layer keeps a number, and where none keeps the number that the config declares: a window that was
    declared and given to no layer is a bug.
    """
    found: dict[tuple[str, int], int | None] = {}
    blocks = subject.blocks()
    for name, block in blocks.items():
        at = layer_of(name, blocks)
        values = [v for module in block.modules() for v in _windows(module)]
        if at is not None and values:
            # a flag that says no counts more than a number, which every layer may keep
            found[at] = None if None in values else values[0]
    declared, kept = subject.facts.whole("window"), set(found.values()) - {None}
    return found if kept and (declared is None or declared in kept) else {}


def _windows(module: nn.Module) -> list[int | None]:
    """What the plain attributes of a module say about a window."""
    found: list[int | None] = []
    for name, value in vars(module).items():
        if not WORDS.search(name.lower()) or not (value is None or isinstance(value, bool | int)):
            continue
        if isinstance(value, bool):
            if value == ("global" in name.lower()):
                found.append(None)
        else:
            found.append(value if value is not None and value > 0 else None)
    return found


def alternate(windowed: list[bool]) -> bool:
    """Whether layers with a window and layers without one follow one another regularly: every second one, or 3 + 1.

    Two layers are too few to tell an order from a window that one of them has lost.
    """
    if len(windowed) < 3 or len(set(windowed)) < 2:
        return False
    if all(a != b for a, b in pairwise(windowed)):
        return True
    periods = [p for p in range(3, len(windowed) // 2 + 1) if all(w == windowed[i % p] for i, w in enumerate(windowed))]
    return bool(periods)
