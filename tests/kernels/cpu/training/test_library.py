"""The kernels of training are built from all their sources, and their structures agree."""

import ctypes
from pathlib import Path

import pytest

from glassformer.kernels.cpu.training import library
from glassformer.kernels.toolchain import cxx


def test_every_source_counts():
    folder = Path(library.__file__).parent
    assert set(library.SOURCES) == {path.name for path in folder.iterdir() if path.suffix in (".cpp", ".h")}


@pytest.mark.skipif(cxx.compiler() is None, reason="no C++ compiler here")
def test_it_loads_and_the_structures_agree():
    made = library.load()
    assert made is library.load()
    assert made.glass_sizes(0) == ctypes.sizeof(library.Task)
    assert made.glass_sizes(1) == ctypes.sizeof(library.FeedForward)


def test_a_library_that_cannot_be_loaded_is_told_in_a_sentence(tmp_path, monkeypatch):
    broken = tmp_path / "train.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(library.cxx, "built", lambda *given: broken)
    library.load.cache_clear()
    with pytest.raises(cxx.CompileError, match="cannot be loaded"):
        library.load()
    library.load.cache_clear()
