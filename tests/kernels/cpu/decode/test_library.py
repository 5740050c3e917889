"""Building: once, atomically, and in one sentence where it cannot be done."""

from pathlib import Path

import pytest

from glassformer.kernels.cpu.decode import library
from glassformer.kernels.toolchain import cxx


def library_path():
    return cxx.library_path(Path(library.__file__).parent, library.SOURCES, library.FLAGS, "glass")


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A cache of its own, and nothing remembered."""
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path))
    library.compiler.cache_clear()
    yield tmp_path
    library.compiler.cache_clear()


def test_without_a_compiler_it_says_what_to_do(fresh, monkeypatch):
    monkeypatch.setattr(cxx.shutil, "which", lambda name: None)
    assert library.unavailable() == "no C++ compiler was found (c++, g++ or clang++)"
    with pytest.raises(library.NativeError, match=r"no C\+\+ compiler was found"):
        library.build()


def test_a_compiler_that_fails_leaves_nothing_and_gives_its_reason(fresh, monkeypatch):
    broken = fresh / "c++"
    broken.write_text("#!/bin/sh\necho 'fatal: no space' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(library.NativeError, match="fatal: no space"):
        library.build()
    assert not library_path().exists()
    assert not list((fresh / "native").iterdir())


def test_another_source_compiler_or_processor_is_another_library(fresh, monkeypatch):
    paths = {library_path()}
    for room, *change in ((library, "FLAGS", ("-O1",)), (cxx, "processor_description", lambda: "another")):
        monkeypatch.setattr(room, *change)
        paths.add(library_path())
    assert len(paths) == 3


@pytest.mark.slow
@pytest.mark.skipif(library.compiler() is None, reason="no C++ compiler here")
def test_it_is_built_once_and_the_structures_agree(fresh):
    path = library.build()
    assert library_path().exists()
    stamp = path.stat().st_mtime_ns
    assert library.build() == path
    assert path.stat().st_mtime_ns == stamp
    assert [item.name for item in path.parent.iterdir()] == [path.name]
