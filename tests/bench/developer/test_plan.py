"""What `bench.developer.plan` concludes from the seconds of a round: the device that explains them, and its gaps."""

import pytest

from glassformer.bench.developer.plan import BUCKET, CASES, CONTEXT, RANKS, STEP, devices_of
from glassformer.sizing.parameters import count
from glassformer.sizing.plan import copies, plan, work

CASE = CASES["384x6-short"]
RATE, MEMORY, LATENCY = 4e10, 1e10, 1e-4


def seconds(gaps: float, waits: float) -> dict[str, float]:
    """Return what a round measures on two ranks with known throughputs, gaps of sharded ranks, and waits of others."""
    layer, held, whole = 4 * CASE.layer, count(CASE.config), work(CASE.config, CONTEXT)
    alone = CASE.each * ((whole.matmuls + whole.attention) / RATE + whole.moved / MEMORY) + STEP * held / MEMORY
    found = {
        "copy": 2 * layer / MEMORY, "latency": LATENCY, "gather": layer / 2 / 2e9 + LATENCY,
        "scatter": layer / 2 / 1e9 + LATENCY, "reduce": min(BUCKET, 4 * held) / 1e9 + 2 * LATENCY, "alone": alone,
        "paced": alone + 8 * CASE.layers * LATENCY + waits,
    }  # fmt: skip
    device = devices_of(CASE, {**found, "silent": alone})["ddp"]
    copied = copies(12 * held, RANKS, device) + 12 * held / MEMORY
    silent = alone + copied - STEP * held / 2 / MEMORY + 3 * (CASE.layers + 1) * LATENCY + gaps
    return {**found, "silent": silent}


def test_a_round_gives_back_the_device_that_made_it():
    devices = devices_of(CASE, seconds(gaps=0.03, waits=0.02))
    assert [devices[way].gaps for way in ("ddp", "fsdp", "tensor", "context")] == pytest.approx([0, 0.03, 0.02, 0.03])
    for device in devices.values():
        assert (device.matmuls, device.memory, device.latency) == pytest.approx((RATE, MEMORY, LATENCY))
        assert (device.link, device.gather, device.scatter) == pytest.approx((1e9, 2e9, 1e9))


def test_waiting_lengthens_the_steps_of_ranks_that_divide_blocks_and_no_others():
    ways = {"fsdp": "sharded", "tensor": "tensor 2"}
    common = {"batch": CASE.each, "context": CONTEXT, "weight_bytes": 4, "width": 4}
    steps = [
        {way: plan(CASE.config, RANKS, devices_of(CASE, seconds(0.03, waits))[way], how, **common).step
         for way, how in ways.items()}
        for waits in (0.0, 0.02)
    ]  # fmt: skip
    assert steps[1]["tensor"] - steps[0]["tensor"] == pytest.approx(0.02)
    assert steps[1]["fsdp"] == pytest.approx(steps[0]["fsdp"])
