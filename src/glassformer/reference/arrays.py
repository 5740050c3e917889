"""The types of the oracle, and the two functions that walk its dotted names.

Everything is a NumPy array in float64. Parameters, saved values and gradients are flat dicts from a dotted name to an
array; a layer sees only its own part of the dict, under short names:

    under({"attention.q.weight": w, "norm.weight": g}, "attention")  ->  {"q.weight": w}
    over({"q.weight": w}, "attention")                               ->  {"attention.q.weight": w}
"""

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
"""True means may attend, or is a real token."""
Tokens = npt.NDArray[np.int64]
Params = dict[str, Array]
"""Parameters by the names of docs/shapes.md; gradients have the same type and the same names."""
Saved = dict[str, Array]
"""What a forward function computed on the way: the sites a reader can look at, and what its backward needs."""


def under(table: dict[str, Array], prefix: str) -> dict[str, Array]:
    """The entries below `prefix`, with the prefix taken off."""
    start = prefix + "."
    return {name[len(start) :]: value for name, value in table.items() if name.startswith(start)}


def over(table: dict[str, Array], prefix: str) -> dict[str, Array]:
    """The same entries with `prefix` put in front of every name."""
    return {f"{prefix}.{name}": value for name, value in table.items()}
