"""How the heads and keys of a decode step are distributed over blocks (attend.cu)."""

from collections.abc import Mapping

from glassformer.kernels.cuda.graph import launches

SPLITS = (8, 4, 2)
"""Blocks that may share the keys of a sequence, if there are too few sequences to keep all processors busy."""
LONG = 8192
"""Slots from which the heads of a block share what they read of the cache, even of one sequence."""
MOST_HEADS = 4
"""Query heads that a block computes together."""
MOST_ROWS = 16
"""The same with tensor cores, whose left matrix has a row for each."""
RING = 128 * 2**10
"""Bytes of keys and values that a block requests ahead, at most."""


def distribution(
    shape: Mapping[str, int], batch: int, slots: int, tensor_cores: bool, processors: int
) -> dict[str, int]:
    """Return the macros of attend.cu that say what a block computes; `shape` has H, G, K and U.

    Without tensor cores, one sequence with few keys is better divided among many blocks.
    """
    group = shape["H"] // shape["G"]
    most = MOST_ROWS if tensor_cores else MOST_HEADS if batch > 1 or slots > LONG else 1
    heads = next(n for n in range(min(group, most), 0, -1) if group % n == 0)
    clusters = batch * shape["H"] // heads
    splits = next((n for n in SPLITS if clusters <= launches.most_clusters(n, processors)), 1)
    made = {"HEADS": heads, "SPLITS": splits, "ROUNDS": 4 if heads == 1 else 2, "TENSOR_CORES": int(tensor_cores)}
    shared = shared_bytes({**shape, **made})
    if not tensor_cores:
        return {**made, "DEPTH": 0, "BLOCKS_AT_ONCE": 2, "DYNAMIC_BYTES": shared}
    tiles = launches.WARPS * sum(16 * 128 * -(-shape[name] // 64) for name in ("K", "U"))  # one for each warp
    depth = 2 if 2 * tiles <= RING else 1
    mixed = 4 * heads * launches.WARPS * shape["U"]  # lies where the ring was
    at_once = 1 if shape["U"] > 64 else 2  # as registers allow
    return {**made, "DEPTH": depth, "BLOCKS_AT_ONCE": at_once, "DYNAMIC_BYTES": shared + max(0, depth * tiles - mixed)}


def shared_bytes(macros: Mapping[str, int]) -> int:
    """Return an upper bound of the shared memory of attend.cu and vectors.cu, without rings."""
    m, warps = macros, launches.WARPS
    return 4 * ((m["HEADS"] + 1) * m["K"] + m["U"] + m["HEADS"] * (warps + 1) * (2 + m["U"])) + 16 * warps + 512
