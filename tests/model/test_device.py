"""The choice of device and dtype is a function of the machine; measurements recognise disturbed rounds."""

import itertools

import pytest
import torch

from glassformer.model import device


@pytest.fixture
def cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return lambda *flags: monkeypatch.setattr(device, "processor_flags", lambda: frozenset(flags))


@pytest.mark.parametrize(
    ("flags", "width", "dtype", "words"),
    [
        (("avx2", "avx512_bf16"), 256, torch.bfloat16, "has bfloat16 instructions (avx512_bf16)"),
        (("amx_bf16",), 768, torch.bfloat16, "(amx_bf16)"),
        (("asimd", "bf16"), 768, torch.bfloat16, "(bf16)"),
        (("amx_bf16",), 128, torch.float32, "a model 128 wide trains faster in float32; from 256 on"),
        (("avx512f",), 768, torch.float32, "has no bfloat16 instructions"),
        ((), 768, torch.float32, "has no bfloat16 instructions"),
    ],
)
def test_a_cpu_trains_in_bfloat16_where_it_has_instructions_and_the_model_is_wide(cpu, flags, width, dtype, words):
    cpu(*flags)
    choice = device.choose_for_training(width=width)
    assert (choice.device, choice.dtype) == ("cpu", dtype)
    assert words in choice.why


def test_no_stopwatch_decides(cpu, monkeypatch):
    cpu("amx_bf16")
    monkeypatch.setattr(device.time, "perf_counter", lambda: pytest.fail("measured"))
    assert device.choose_for_training().dtype is torch.bfloat16


@pytest.mark.parametrize("supported", [True, False])
def test_a_gpu_trains_in_bfloat16_where_it_has_it(monkeypatch, supported):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: supported)
    choice = device.choose_for_training(width=8)
    assert (choice.device, choice.dtype) == ("cuda", torch.bfloat16 if supported else torch.float32)
    assert choice.why == f"A GPU has{'' if supported else ' no'} bfloat16 tensor cores"


def test_what_is_requested_is_used_or_refused(cpu):
    cpu("amx_bf16")
    assert device.choose_for_training("cpu", "float32").dtype is torch.float32
    with pytest.raises(ValueError, match="no CUDA device is here"):
        device.choose_device("cuda")
    with pytest.raises(ValueError, match="device='tpu' is not known: use one of auto, cpu, cuda"):
        device.choose_device("tpu")


def test_measured_rate_counts_two_operations_per_multiply_add(monkeypatch):
    ticks = map(float, range(100))
    monkeypatch.setattr(device.time, "perf_counter", lambda: next(ticks))
    assert device.measure_matmul("cpu", torch.float32, 10) == pytest.approx(2 * 10**3 / 1e9)


def rounds(monkeypatch, *seconds):
    """Rounds that take these times, for ever again, on a clock that only they move."""
    taken, now = itertools.cycle(seconds), [0.0]

    def round_(a, clock):
        now[0] += (last := next(taken))
        return last

    monkeypatch.setattr(device, "_round", round_)
    return lambda: now[0]


def test_rounds_that_agree_end_the_measurement_early(monkeypatch):
    found = device.measure_throughput("cpu", torch.float32, 128, *[rounds(monkeypatch, 0.001)] * 2)
    assert (found.rounds, found.disturbed) == (4, False)
    assert found.gflops == pytest.approx(2 * 128**3 / 0.001 / 1e9)


def test_some_disturbed_rounds_do_no_harm(monkeypatch):
    found = device.measure_throughput("cpu", torch.float32, 128, *[rounds(monkeypatch, 0.3, 0.001, 0.08, 0.00101)] * 2)
    assert not found.disturbed
    assert found.gflops == pytest.approx(2 * 128**3 / 0.001 / 1e9)


def test_rounds_that_never_agree_are_disturbed_and_end_in_time(monkeypatch):
    times = [0.001 * 1.2**n for n in range(60)]
    found = device.measure_throughput("cpu", torch.float32, 128, clock := rounds(monkeypatch, *times), clock)
    assert found.disturbed
    assert clock() < 3 * device.SECONDS


def test_rounds_that_wait_for_a_core_are_disturbed_even_if_they_agree(monkeypatch):
    """On a busy machine each round can last the same time slices of the scheduler."""
    wall = rounds(monkeypatch, 0.09)
    found = device.measure_throughput("cpu", torch.float32, 128, wall, lambda: 0.1 * wall())
    assert found.disturbed


def test_what_would_take_many_seconds_is_measured_by_less(monkeypatch):
    tried = []

    def round_(a, clock):
        tried.append(len(a))
        return len(a) ** 3 / 1e9

    monkeypatch.setattr(device, "_round", round_)
    found = device.measure_throughput("cpu", torch.float32, 1024)
    assert found.size == 512  # of 1024 one round would take more than a second
    assert max(tried) == 512
    assert found.gflops == pytest.approx(2.0)
