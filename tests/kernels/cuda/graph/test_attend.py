"""How heads and keys are distributed over blocks. What the kernel computes: test_fused.py."""

import pytest

from glassformer.kernels.cuda.graph import attend, launches


@pytest.mark.parametrize(
    ("batch", "heads", "groups", "slots", "wanted"),
    [
        (1, 32, 8, 640, (1, 2, 0)),
        (1, 32, 8, 16384, (4, 8, 0)),
        (1, 32, 8, 640, (4, 8, 1)),
        (4, 32, 8, 640, (4, 2, 1)),
        (16, 32, 8, 640, (4, 1, 1)),
        (2, 71, 1, 640, (1, 1, 1)),
        (2, 48, 1, 640, (16, 8, 1)),
        (64, 12, 12, 640, (1, 1, 1)),
    ],
)
def test_heads_share_keys_and_blocks_share_heads(batch, heads, groups, slots, wanted):
    shape = {"H": heads, "G": groups, "K": 64, "U": 64}
    found = attend.distribution(shape, batch, slots, wanted[2] == 1, 132)
    assert (found["HEADS"], found["SPLITS"], found["TENSOR_CORES"]) == wanted
    assert found["DYNAMIC_BYTES"] <= launches.SHARED_MEMORY


@pytest.mark.parametrize("width", [8, 64, 80, 128, 256])
def test_the_memory_of_a_block_is_large_enough_for_every_width(width):
    """The source checks the size too, where it is compiled."""
    shape = {"H": 32, "G": 2, "K": width, "U": width}
    found = attend.distribution(shape, 2, 640, True, 132)
    ring = found["DEPTH"] * launches.WARPS * 16 * 2 * 2 * -(-width // 64) * 64
    assert ring < found["DYNAMIC_BYTES"] <= launches.SHARED_MEMORY
    assert found["DEPTH"] == (2 if width <= 128 else 1)
