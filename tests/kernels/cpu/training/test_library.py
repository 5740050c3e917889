"""The kernels of training are built once, and their structures agree."""

import ctypes

import pytest

from glassformer.kernels.cpu.training import library
from glassformer.kernels.toolchain import cxx


@pytest.mark.skipif(cxx.compiler() is None, reason="no C++ compiler here")
def test_it_loads_and_the_structures_agree():
    made = library.load()
    assert made is library.load()
    assert made.glass_sizes(0) == ctypes.sizeof(library.Task)
    assert made.glass_sizes(1) == ctypes.sizeof(library.FeedForward)
