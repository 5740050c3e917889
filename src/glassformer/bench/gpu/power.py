"""Energy and clock of a GPU while it works, read from the driver's counters (NVML)."""

import ctypes
import time
from dataclasses import dataclass, field
from typing import Any

_SM = 1
"""NVML_CLOCK_SM."""


@dataclass
class Meter:
    """Measures the first GPU. Without the driver's counters, nothing is measured and `text` is empty."""

    library: Any = None
    device: Any = None
    joules: float = 0.0
    seconds: float = 0.0
    clocks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        try:
            self.library = self.library or ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        self.device = ctypes.c_void_p()
        if self.library.nvmlInit_v2() or self.library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self.device)):
            self.device = None

    def _energy(self) -> float:
        """Return the joules used since the driver was loaded."""
        found = ctypes.c_ulonglong()
        if self.library.nvmlDeviceGetTotalEnergyConsumption(self.device, ctypes.byref(found)):
            self.device = None
        return found.value / 1000

    def begin(self) -> None:
        """Start to measure energy and time."""
        if self.device is not None:
            self._since = time.perf_counter(), self._energy()

    def look(self) -> None:
        """Record the current clock."""
        if self.device is not None:
            found = ctypes.c_uint()
            if not self.library.nvmlDeviceGetClockInfo(self.device, _SM, ctypes.byref(found)):
                self.clocks.append(found.value)

    def end(self) -> None:
        """Add the energy and time since `begin`."""
        if self.device is not None:
            self.seconds += time.perf_counter() - self._since[0]
            self.joules += self._energy() - self._since[1]

    def text(self) -> str:
        """Return mean power, power limit and median clock; empty if nothing was measured."""
        if self.device is None or not self.seconds or not self.clocks:
            return ""
        limit = ctypes.c_uint()
        self.library.nvmlDeviceGetEnforcedPowerLimit(self.device, ctypes.byref(limit))
        clock = sorted(self.clocks)[len(self.clocks) // 2]
        return f"{self.joules / self.seconds:.0f} W of {limit.value / 1000:.0f} allowed, {clock} MHz"
