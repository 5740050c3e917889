"""Energy between two readings of a counter, and the middle one of the clocks seen."""

import ctypes

import pytest

from glassformer.bench.gpu import power


class Counters:
    """Stands in for NVML: 500 J at first, 30 more at each reading."""

    def __init__(self, fails=()):
        self.fails, self.millijoules, self.clocks = fails, 500_000, iter((1980, 1200, 1500))

    def nvmlInit_v2(self):
        return int("init" in self.fails)

    def nvmlDeviceGetHandleByIndex_v2(self, index, at):
        return index

    def nvmlDeviceGetTotalEnergyConsumption(self, device, at):
        ctypes.cast(at, ctypes.POINTER(ctypes.c_ulonglong))[0] = self.millijoules
        self.millijoules += 30_000
        return int("energy" in self.fails)

    def nvmlDeviceGetClockInfo(self, device, kind, at):
        ctypes.cast(at, ctypes.POINTER(ctypes.c_uint))[0] = next(self.clocks)
        return 0

    def nvmlDeviceGetEnforcedPowerLimit(self, device, at):
        ctypes.cast(at, ctypes.POINTER(ctypes.c_uint))[0] = 700_000
        return 0


def test_joules_over_seconds_are_watts(monkeypatch):
    times = iter((10.0, 10.5, 20.0, 20.1))
    monkeypatch.setattr(power.time, "perf_counter", lambda: next(times))
    meter = power.Meter(Counters())
    for _ in range(2):
        meter.begin()
        meter.look()
        meter.end()
    meter.look()
    assert meter.joules == 60
    assert meter.text() == "100 W of 700 allowed, 1500 MHz"


@pytest.mark.parametrize("missing", ["init", "energy"])
def test_without_counters_nothing_is_printed(missing):
    meter = power.Meter(Counters(fails=(missing,)))
    meter.begin()
    meter.look()
    meter.end()
    assert meter.text() == ""


def test_without_the_library_nothing_is_printed(monkeypatch):
    def absent(name):
        raise OSError(name)

    monkeypatch.setattr(power.ctypes, "CDLL", absent)
    meter = power.Meter()
    meter.begin()
    meter.end()
    assert meter.text() == ""
