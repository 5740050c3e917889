"""The decode kernels are built once; where they cannot be, one sentence says so."""

import pytest

from glassformer.kernels.cpu.decode import library
from glassformer.kernels.toolchain import cxx


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A cache of its own, and nothing remembered."""
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path))
    for remembered in (cxx.compiler, library.load):
        remembered.cache_clear()
    yield tmp_path
    for remembered in (cxx.compiler, library.load):
        remembered.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_without_a_compiler_it_says_what_to_do(monkeypatch):
    monkeypatch.setattr(cxx.shutil, "which", lambda name: None)
    assert library.unavailable() == "no C++ compiler was found (c++, g++ or clang++)"
    with pytest.raises(library.NativeError, match=r"no C\+\+ compiler was found.*, or use engine='torch'\."):
        library.load()


@pytest.mark.slow
@pytest.mark.skipif(cxx.compiler() is None, reason="no C++ compiler here")
def test_it_is_built_once_and_the_structures_agree(fresh):
    made = library.load()
    assert made is library.load()
    (path,) = (fresh / "native").iterdir()
    assert path == cxx.build(library.SOURCE, library.FLAGS)
