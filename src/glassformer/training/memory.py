"""Memory that a step frees is what the next one needs: on a CPU the C library is told to keep it.

glibc gives the end of its heap back to the system, and takes large tensors from it afresh, so that thousands of pages a
step are mapped and cleared anew: a sixth of the time of a bfloat16 step of 10 million parameters.
"""

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""glibc's names for its settings (mallopt(3))."""
LARGEST = 32 << 20
"""Bytes up to which tensors come from the heap; the most that glibc allows."""


def keep_freed() -> bool:
    """Let this process keep what it frees, for itself; False where the C library has no such setting."""
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return False
    return bool(mallopt(_MMAP_THRESHOLD, LARGEST)) and bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1))
