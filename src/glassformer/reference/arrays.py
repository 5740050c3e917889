"""Array types of the oracle, and two functions for the dotted names of its parameters.

Every array is NumPy float64. Parameters, saved activations and gradients are flat dicts from a dotted name to an array.
A layer receives only its own part of the dict, with the prefix removed:

    select_prefix({"attention.q.weight": w, "norm.weight": g}, "attention")  ->  {"q.weight": w}
    add_prefix({"q.weight": w}, "attention")                                 ->  {"attention.q.weight": w}
"""

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
"""Boolean mask. In an attention mask True = may attend; in a padding mask True = real token."""
Tokens = npt.NDArray[np.int64]
"""Integer ids: token ids, position ids or segment ids."""
Params = dict[str, Array]
"""Parameters by the names of docs/shapes.md. Gradients use the same type and the same names."""
Saved = dict[str, Array]
"""Activations that a forward function saved: for inspection, and as inputs of its backward function."""


def select_prefix(table: dict[str, Array], prefix: str) -> dict[str, Array]:
    """Return the entries whose names start with `prefix.`, with that prefix removed."""
    start = prefix + "."
    return {name[len(start) :]: value for name, value in table.items() if name.startswith(start)}


def add_prefix(table: dict[str, Array], prefix: str) -> dict[str, Array]:
    """Return the same entries with `prefix.` added to every name."""
    return {f"{prefix}.{name}": value for name, value in table.items()}
