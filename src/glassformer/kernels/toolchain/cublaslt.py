"""Matmuls of cuBLASLt, which comes with torch, that also compute what follows them: GELU, or its derivative.

torch calls the same library, but without these epilogues. All matmuls of a device share a workspace: use them on one
stream at a time.

The library offers several algorithms, and its first choice can be a sixth slower than the fastest. Each is timed once
for each size. Only those are considered whose results have the same bits, so the choice does not change any result.
"""

import ctypes
import statistics
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from glassformer.kernels.toolchain.nvrtc import CudaError

ALIGNED = 8
"""Sizes must be multiples of so many numbers: 16 bytes."""
WORKSPACE = 32 * 2**20
OFFERED, ROUNDS, RUNS = 8, 3, 4
"""Algorithms that the library is asked for; rounds in which they take turns, each the mean of so many runs."""
EPILOGUES = {"gelu": 160, "gelu_bias": 164, "gelu_backward": 192}
"""CUBLASLT_EPILOGUE_: GELU_AUX, GELU_AUX_BIAS, DGELU. GELU is its tanh approximation."""
# constants of cublasLt.h
_BFLOAT16, _FLOAT32, _SUMS_IN_FLOAT32 = 14, 0, 68
_TRANSPOSE_A, _EPILOGUE, _BIAS, _AUX, _AUX_STEP, _AUX_TYPE, _BIAS_TYPE = 3, 7, 8, 11, 12, 22, 26
_WORKSPACE_BYTES = 1


class _Offer(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int32),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int32 * 4),
    ]


class Sizes(NamedTuple):
    """A matmul (M,K) x (K,N) of contiguous matrices. `transposed`: the right factor is stored as (N,K)."""

    M: int
    N: int
    K: int
    transposed: bool

    def layouts(self) -> tuple[tuple[int, int], ...]:
        """Return (rows, columns) of both factors and the result as the library sees them.

        A row-major matrix is the transpose of a column-major one, so the library computes (left right)^T =
        right^T left^T: the right factor comes first.
        """
        return ((self.K, self.N) if self.transposed else (self.N, self.K)), (self.K, self.M), (self.N, self.M)


@cache
def _library() -> Any:
    major = (torch.version.cuda or "").partition(".")[0]
    homes = [p for entry in torch.__path__ for p in Path(entry).parent.glob("nvidia/**/libcublasLt.so*")]
    for name in (f"libcublasLt.so.{major}", *map(str, sorted(homes))):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


@cache
def is_available() -> bool:
    """Return whether there is an NVIDIA GPU and the library."""
    return torch.cuda.is_available() and torch.version.cuda is not None and _library() is not None


def supports(*matrices: Tensor) -> bool:
    """Return whether matrices can be multiplied here: bfloat16 on a GPU, contiguous, of aligned sizes."""
    return all(
        t.is_cuda and t.dtype is torch.bfloat16 and t.is_contiguous() and t.data_ptr() % 16 == 0
        and all(size % ALIGNED == 0 for size in t.shape)
        for t in matrices
    ) and is_available()  # fmt: skip


def gelu_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return gelu(y) and y = x weight^T + bias, for x (M,K) and weight (N,K), all in bfloat16."""
    sizes = Sizes(len(x), len(weight), x.shape[1], True)
    out, inner = torch.empty(2, sizes.M, sizes.N, dtype=torch.bfloat16, device=x.device)
    plan(sizes, "gelu" if bias is None else "gelu_bias", x.device.index or 0).run(x, weight, out, inner, bias)
    return out, inner


def gelu_backward(d_out: Tensor, weight: Tensor, inner: Tensor) -> Tensor:
    """Return (d_out weight) gelu'(inner), for d_out (M,K) and weight (K,N), all in bfloat16."""
    sizes = Sizes(len(d_out), weight.shape[1], len(weight), False)
    out = torch.empty_like(inner)
    plan(sizes, "gelu_backward", d_out.device.index or 0).run(d_out, weight, out, inner, None)
    return out


def _call(name: str, *arguments: Any) -> None:
    failed = getattr(_library(), name)(*arguments)
    if failed:
        raise CudaError(f"cuBLASLt answered {name} with error {failed}: train with machine.compile='yes'.")


@cache
def _handle(device: int) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        _call("cublasLtCreate", ctypes.byref(handle))
    return handle


@cache
def _workspace(device: int) -> Tensor:
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=f"cuda:{device}")


class Plan:
    """A matmul with an epilogue: its description, and the algorithm."""

    def __init__(self, sizes: Sizes, epilogue: str, device: int):
        self.device, self.description, self.algorithm = device, ctypes.c_void_p(), None
        _call("cublasLtMatmulDescCreate", ctypes.byref(self.description), _SUMS_IN_FLOAT32, _FLOAT32)
        self._set(_TRANSPOSE_A, ctypes.c_int32(sizes.transposed))
        self._set(_EPILOGUE, ctypes.c_int32(EPILOGUES[epilogue]))
        self._set(_AUX_STEP, ctypes.c_int64(sizes.N))
        self._set(_AUX_TYPE, ctypes.c_int32(_BFLOAT16))
        self._set(_BIAS_TYPE, ctypes.c_int32(_BFLOAT16))
        self.layouts = [_layout(*shape) for shape in sizes.layouts()]
        self.offers = self._offers(sizes)

    def _set(self, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        _call("cublasLtMatmulDescSetAttribute", self.description, attribute, ctypes.byref(value), size)

    def _offers(self, sizes: Sizes) -> list[Any]:
        """Return the algorithms for these sizes, in the order of the library's heuristic."""
        preference, found, offers = ctypes.c_void_p(), ctypes.c_int32(), (_Offer * OFFERED)()
        _call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        most = ctypes.c_uint64(WORKSPACE)
        _call(
            "cublasLtMatmulPreferenceSetAttribute", preference, _WORKSPACE_BYTES, ctypes.byref(most),
            ctypes.c_size_t(ctypes.sizeof(most)),
        )  # fmt: skip
        a, b, c = self.layouts
        _call(
            "cublasLtMatmulAlgoGetHeuristic", _handle(self.device), self.description, a, b, c, c, preference, OFFERED,
            offers, ctypes.byref(found),
        )  # fmt: skip
        _call("cublasLtMatmulPreferenceDestroy", preference)
        if not found.value:
            raise CudaError(f"cuBLASLt has no algorithm for {sizes}: train with machine.compile='yes'.")
        return [offer.algorithm for offer in offers[: found.value]]

    def run(self, left: Tensor, right: Tensor, out: Tensor, aux: Tensor, bias: Tensor | None) -> None:
        """Multiply on the current stream. `aux` is written by "gelu", and read by "gelu_backward"."""
        self._set(_AUX, ctypes.c_uint64(aux.data_ptr()))
        if bias is not None:
            self._set(_BIAS, ctypes.c_uint64(bias.data_ptr()))

        def multiply(algorithm: Any) -> int:
            return self._multiply(algorithm, left, right, out)

        if self.algorithm is None and not torch.cuda.is_current_stream_capturing():  # nothing can be timed in a capture
            self.algorithm = fastest_equal(self.offers, multiply, (out, aux))
        if failed := multiply(self.algorithm or self.offers[0]):
            raise CudaError(f"cuBLASLt answered cublasLtMatmul with error {failed}: train with machine.compile='yes'.")

    def _multiply(self, algorithm: Any, left: Tensor, right: Tensor, out: Tensor) -> int:
        """Launch the matmul by an algorithm; return the library's error, or 0."""
        one, zero, (a, b, c) = ctypes.c_float(1), ctypes.c_float(0), self.layouts
        first, second, result = (ctypes.c_void_p(t.data_ptr()) for t in (right, left, out))
        failed: int = _library().cublasLtMatmul(
            _handle(self.device), self.description, ctypes.byref(one), first, a, second, b, ctypes.byref(zero), result,
            c, result, c, ctypes.byref(algorithm), ctypes.c_void_p(_workspace(self.device).data_ptr()),
            ctypes.c_size_t(WORKSPACE), ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream),
        )  # fmt: skip
        return failed


def fastest_equal(offers: list[Any], multiply: Callable[[Any], int], written: tuple[Tensor, ...]) -> Any:
    """Return the fastest algorithm among those that write the same bits as the first one that works."""
    wanted: list[Tensor] = []
    equal = []
    for algorithm in offers:
        if multiply(algorithm):
            continue
        bits = [t.view(torch.int16) for t in written]
        wanted = wanted or [t.clone() for t in bits]
        if all(torch.equal(a, b) for a, b in zip(bits, wanted, strict=True)):
            equal.append(algorithm)
    if not equal:
        raise CudaError("cuBLASLt refused all its algorithms for a matmul: train with machine.compile='yes'.")
    rounds = [[milliseconds(lambda: multiply(algorithm)) for algorithm in equal] for _ in range(ROUNDS)]  # noqa: B023
    medians = [statistics.median(taken) for taken in zip(*rounds, strict=True)]
    return equal[medians.index(min(medians))]


def milliseconds(work: Callable[[], Any]) -> float:
    """Return the time of some calls on the current stream."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(RUNS):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _layout(rows: int, columns: int) -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    sizes = (ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows))
    _call("cublasLtMatrixLayoutCreate", ctypes.byref(made), _BFLOAT16, *sizes)
    return made


@cache
def plan(sizes: Sizes, epilogue: str, device: int) -> Plan:
    """Return the plan of a matmul, made once."""
    return Plan(sizes, epilogue, device)
