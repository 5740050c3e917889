"""C++ on demand: once, atomically, and in one sentence where it cannot be done."""

import ctypes

import pytest

from glassformer.kernels.toolchain import cxx

FLAGS = ("-O1", "-shared", "-fPIC")


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A cache of its own, a small source, and nothing remembered."""
    tmp_path = tmp_path / "sources"
    tmp_path.mkdir()
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "number.h").write_text("struct Pair { int a, b; };\n")
    text = '#include "number.h"\nextern "C" long long glass_sizes(int) { return sizeof(Pair); }\n'
    (tmp_path / "three.cpp").write_text(text)
    cxx.compiler.cache_clear()
    yield tmp_path
    cxx.compiler.cache_clear()


def test_without_a_compiler_it_says_so(fresh, monkeypatch):
    monkeypatch.setattr(cxx.shutil, "which", lambda name: None)
    with pytest.raises(cxx.CompileError, match=r"no C\+\+ compiler was found"):
        cxx.build(fresh / "three.cpp", FLAGS)


def test_a_compiler_that_fails_leaves_nothing_and_gives_its_reason(fresh, monkeypatch):
    broken = fresh / "c++"
    broken.write_text("#!/bin/sh\necho 'fatal: no space' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(cxx.CompileError, match="fatal: no space"):
        cxx.build(fresh / "three.cpp", FLAGS)
    assert not list((fresh / "cache" / "native").iterdir())


def test_a_compiler_that_hangs_is_given_up_on(fresh, monkeypatch):
    slow = fresh / "c++"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("CXX", str(slow))
    monkeypatch.setattr(cxx, "SECONDS", 0.1)
    with pytest.raises(cxx.CompileError, match="could not compile"):
        cxx.build(fresh / "three.cpp", FLAGS)


def test_another_source_flag_or_processor_is_another_library(fresh, monkeypatch):
    paths = {cxx.library_path(fresh / "three.cpp", FLAGS), cxx.library_path(fresh / "three.cpp", ("-O0",))}
    with (fresh / "number.h").open("a") as header:
        header.write("// another\n")
    paths.add(cxx.library_path(fresh / "three.cpp", FLAGS))
    (fresh.parent / "shared.h").write_text("// of several libraries\n")
    paths.add(cxx.library_path(fresh / "three.cpp", FLAGS))
    monkeypatch.setattr(cxx, "processor_description", lambda: "another")
    paths.add(cxx.library_path(fresh / "three.cpp", FLAGS))
    assert len(paths) == 5


@pytest.mark.skipif(cxx.compiler() is None, reason="no C++ compiler here")
def test_it_is_built_once_and_structures_are_compared(fresh):
    path = cxx.build(fresh / "three.cpp", FLAGS)
    stamp = path.stat().st_mtime_ns
    assert cxx.build(fresh / "three.cpp", FLAGS) == path
    assert path.stat().st_mtime_ns == stamp
    assert [item.name for item in path.parent.iterdir()] == [path.name]

    class Pair(ctypes.Structure):
        _fields_ = [("a", ctypes.c_int), ("b", ctypes.c_int)]

    class Longer(ctypes.Structure):
        _fields_ = [("a", ctypes.c_int64), ("b", ctypes.c_int64)]

    function = {"glass_sizes": (ctypes.c_int32, [ctypes.c_int32])}
    assert cxx.load(fresh / "three.cpp", FLAGS, (Pair,), function).glass_sizes.restype is ctypes.c_int32
    with pytest.raises(cxx.CompileError, match="Longer differently"):
        cxx.load(fresh / "three.cpp", FLAGS, (Pair, Longer), {})


def test_a_library_that_cannot_be_loaded_is_reported_in_a_sentence(tmp_path, monkeypatch):
    broken = tmp_path / "train.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(cxx, "build", lambda *given: broken)
    with pytest.raises(cxx.CompileError, match="cannot be loaded"):
        cxx.load(tmp_path / "three.cpp", FLAGS, (), {})


@pytest.mark.parametrize(
    ("flags", "bits"),
    [
        ("fpu avx fma avx2 avx512f", 512),
        ("fpu avx fma avx2 bmi2", 256),
        ("fpu avx avx2", 128),
        ("Features: asimd", 128),
    ],
)
def test_how_long_registers_are_is_read_from_the_processors_flags(flags, bits, monkeypatch):
    monkeypatch.setattr(cxx, "processor_description", lambda: f"flags\t\t: {flags}")
    assert cxx.register_bits() == bits


@pytest.mark.parametrize(("name", "intel"), [("Intel(R) Xeon(R) Processor", True), ("AMD EPYC", False)])
def test_who_made_the_processor_is_read_from_its_name(name, intel, monkeypatch):
    monkeypatch.setattr(cxx, "processor_description", lambda: f"flags\t\t: fpu avxmodel name\t: {name}")
    assert cxx.is_intel() is intel
