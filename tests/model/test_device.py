import pytest
import torch

from glassformer.model import device


@pytest.mark.parametrize(
    ("rates", "dtype"),
    [((100.0, 250.0), torch.bfloat16), ((100.0, 110.0), torch.float32), ((100.0, 30.0), torch.float32)],
)
def test_bf16_is_chosen_only_where_it_is_measured_to_be_faster(monkeypatch, rates, dtype):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    measured = {torch.float32: rates[0], torch.bfloat16: rates[1]}
    monkeypatch.setattr(device, "measure_matmul", lambda _, kind, size: measured[kind])
    choice = device.choose_device()
    assert choice.device == "cpu"
    assert choice.dtype is dtype
    assert f"{rates[1]:,.0f} GFLOP/s in bfloat16" in choice.why


@pytest.mark.parametrize(("threads", "said"), [(1, "CPU, 1 thread, "), (2, "CPU, 2 threads, ")])
def test_threads_are_counted_in_words(monkeypatch, threads, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(device, "measure_matmul", lambda *_: 100.0)
    assert device.choose_device().why.startswith(said)


def test_measured_rate_counts_two_operations_per_multiply_add(monkeypatch):
    ticks = map(float, range(100))
    monkeypatch.setattr(device.time, "perf_counter", lambda: next(ticks))
    assert device.measure_matmul("cpu", torch.float32, 10) == pytest.approx(2 * 10**3 / 1e9)


def test_what_would_take_many_seconds_is_measured_by_less(monkeypatch):
    tried = []

    def best_time(_, kind, size, repeats):
        tried.append(size)
        return 2 * size**3 / (1e9 if kind is torch.bfloat16 else 1e11)

    monkeypatch.setattr(device, "_best_time", best_time)
    assert device.measure_matmul("cpu", torch.bfloat16, 1024) == pytest.approx(1.0)
    assert tried == [128]
    assert device.measure_matmul("cpu", torch.float32, 1024) == pytest.approx(100.0)
    assert tried == [128, 128, 1024]
