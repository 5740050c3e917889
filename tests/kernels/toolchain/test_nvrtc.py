"""Compiling CUDA at run time: what is reported where it cannot be, and that code is made once."""

import ctypes
import types

import pytest
import torch

from glassformer.kernels.toolchain import nvrtc


class Compiler:
    """Stands in for NVRTC."""

    def __init__(self, fails=False):
        self.fails, self.made = fails, 0

    def nvrtcVersion(self, major, minor):
        return 0

    def nvrtcCreateProgram(self, *given):
        return 0

    def nvrtcCompileProgram(self, program, count, options):
        self.options = [options[i].decode() for i in range(count)]
        self.made += 1
        return 6 if self.fails else 0

    def nvrtcGetProgramLogSize(self, program, size):
        size._obj.value = 64
        return 0

    def nvrtcGetProgramLog(self, program, log):
        log.value = b"kernel.cu(3): error: no such thing"
        return 0

    def nvrtcGetCUBINSize(self, program, size):
        size._obj.value = 4
        return 0

    def nvrtcGetCUBIN(self, program, made):
        made.raw = b"code"
        return 0

    def nvrtcDestroyProgram(self, program):
        return 0


def test_numbers_stand_before_the_texts_that_name_them(tmp_path):
    (tmp_path / "a.cu").write_text("int a[ROWS];")
    whole = nvrtc.source(tmp_path, ("a.cu", "b.cu"), {"ROWS": 3, "WIDTH": 64}, {"b.cu": "int b[WIDTH];"})
    assert whole.splitlines() == ["#define ROWS 3", "#define WIDTH 64", "int a[ROWS];", "int b[WIDTH];"]


def test_code_is_compiled_once_and_kept(monkeypatch, tmp_path):
    compiler = Compiler()
    monkeypatch.setattr(nvrtc, "_compiler", lambda: compiler)
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path))
    assert nvrtc.compiled("a", (9, 0)) == nvrtc.compiled("a", (9, 0)) == b"code"
    assert compiler.made == 1
    assert "--gpu-architecture=sm_90a" in compiler.options
    nvrtc.compiled("a", (8, 0))
    nvrtc.compiled("b", (9, 0))
    assert compiler.made == 3
    assert len(list((tmp_path / "cuda").iterdir())) == 3


def test_an_error_of_the_compiler_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(nvrtc, "_compiler", lambda: Compiler(fails=True))
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path))
    with pytest.raises(nvrtc.CudaError, match="no such thing"):
        nvrtc.compiled("a", (9, 0))
    assert not (tmp_path / "cuda").exists()


def test_without_the_compiler_it_says_so(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(nvrtc, "ctypes", types.SimpleNamespace(CDLL=missing))
    nvrtc._compiler.cache_clear()
    with pytest.raises(nvrtc.CudaError, match="libnvrtc"):
        nvrtc._compiler()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_kernel_runs():
    class Given(ctypes.Structure):
        _fields_ = [("out", ctypes.c_void_p), ("step", ctypes.c_int)]

    text = """struct Given { int* out; int step; };
    extern "C" __global__ void count(Given a) { a.out[32 * blockIdx.x + threadIdx.x] = a.step * threadIdx.x; }"""
    out = torch.zeros(64, dtype=torch.int32, device="cuda")
    nvrtc.kernel(text, "count", 0).launch(Given(out.data_ptr(), 3), 2, 32)
    assert out.tolist() == [3 * i for i in range(32)] * 2


def test_hopper_alone_has_a_name_for_its_own_instructions():
    assert [nvrtc.architecture(c) for c in ((8, 0), (8, 9), (9, 0), (10, 0))] == ["sm_80", "sm_89", "sm_90a", "sm_100"]


def test_the_copy_engine_takes_columns_first_and_bytes_between_rows(monkeypatch):
    seen = {}

    class Driver:
        def cuTensorMapEncodeTiled(self, at, kind, axes, address, sizes, step, box, every, *rest):
            ctypes.memset(at, 7, 128)
            seen.update(at=at.value, kind=kind, axes=axes, address=address.value, rest=rest)
            seen.update(sizes=list(sizes), step=list(step), box=list(box), every=list(every))
            return 0

    monkeypatch.setattr(nvrtc, "_driver", Driver)
    matrix = torch.zeros(10, 80, dtype=torch.bfloat16)[:, :72]
    made = nvrtc.tensor_map(matrix, 32)
    assert bytes(made) == b"\7" * 128
    assert seen.pop("at") % 64 == 0
    assert seen == {
        "kind": 9, "axes": 2, "address": matrix.data_ptr(), "sizes": [72, 10], "step": [160], "box": [64, 32],
        "every": [1, 1], "rest": (0, 3, 3, 0),
    }  # fmt: skip


def test_without_the_compiler_nothing_can_be_launched(monkeypatch):
    def missing():
        raise nvrtc.CudaError("no libnvrtc")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(nvrtc, "_compiler", lambda: "a library")
    assert nvrtc.can_launch()
    monkeypatch.setattr(nvrtc, "_compiler", missing)
    assert not nvrtc.is_available()
    assert not nvrtc.can_launch()


def test_the_answer_is_marked_as_constant_just_as_torch_marks_it():
    marked = torch.compiler.assume_constant_result(lambda: True)
    assert vars(nvrtc.can_launch) == vars(marked) != {}
