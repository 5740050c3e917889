"""Matmuls by cuBLASLt, which comes with torch, with the fastest of the algorithms that it offers.

torch uses the first choice of the library's heuristic. Over the training matmuls of GPT-2 on an H200 (cuBLAS 13.1), the
fastest of eight takes 8 % less time in bfloat16 and 11 % less in 8 bits, up to 25 % for a single size. Which one that
is differs from size to size, so each size is timed once, at its first use.

All matmuls of one device share a workspace: use them on one stream at a time.
"""

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glassformer.kernels.toolchain.nvrtc import CudaError

OFFERED = 8
"""Algorithms that are requested and timed."""
ALIGNED = 16
"""Alignment of addresses and rows in bytes."""
WORKSPACE = 32 * 2**20
ROUNDS, RUNS = 3, 4
"""Algorithms are timed in turn, so that a slow moment of the device affects all; a round is the mean of RUNS runs."""
# constants of cublasLt.h
_TYPES = {torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
_FLOAT32, _IN_FLOAT32 = 0, 68
_TURN_A, _TURN_B, _EPILOGUE, _BIAS, _A_UNIT, _B_UNIT, _FAST, _BIAS_TYPE = 3, 4, 7, 8, 17, 18, 25, 26
_KEPT, _KEPT_STEP, _KEPT_TYPE = 11, 12, 22
_ADD_BIAS = 4
_FINISHES = {"": 0, "gelu": 160, "gelu_slope": 192}
"""Epilogues with an auxiliary tensor of the size of the result: GELU_AUX and DGELU."""
_WORKSPACE_BYTES, _FIRST_ALIGNMENT = 1, 5


class _Offer(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int32),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int32 * 4),
    ]


@dataclass(frozen=True)
class Stored:
    """A column-major matrix as the library sees it, and whether it is transposed first."""

    rows: int
    columns: int
    step: int
    """Elements from one column to the next."""
    turned: bool


@dataclass(frozen=True)
class Sizes:
    """The properties of a matmul (M,K) x (K,N), row-major, on which the choice of an algorithm depends."""

    M: int
    N: int
    K: int
    types: tuple[torch.dtype, torch.dtype]
    turned: tuple[bool, bool]
    """Whether the left factor is stored as (K,M), the right one as (N,K)."""
    steps: tuple[int, int]
    """Elements from row to row of each, as stored."""
    biased: bool
    scaled: bool
    fast: bool
    device: int
    finish: str = ""

    def seen(self) -> tuple[Stored, Stored, Stored]:
        """Return both factors and the result as the library sees them.

        A row-major matrix is the transpose of a column-major one, so the library computes (left right)^T =
        right^T left^T.
        """
        left, right = self.turned
        first = Stored(self.K, self.N, self.steps[1], True) if right else Stored(self.N, self.K, self.steps[1], False)
        second = Stored(self.M, self.K, self.steps[0], True) if left else Stored(self.K, self.M, self.steps[0], False)
        return first, second, Stored(self.N, self.M, self.N, False)


@cache
def _library() -> Any:
    major = (torch.version.cuda or "").partition(".")[0]
    homes = [p for entry in torch.__path__ for p in Path(entry).parent.glob("nvidia/**/libcublasLt.so*")]
    for name in (f"libcublasLt.so.{major}", *map(str, sorted(homes))):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CudaError("cuBLASLt was not found: install torch with CUDA.")


@cache
def available() -> bool:
    """Return whether there is an NVIDIA GPU and the library."""
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return False
    try:
        _library()
    except CudaError:
        return False
    return True


def suits(left: Tensor, right: Tensor) -> bool:
    """Return whether two matrices are supported: their rows must be multiples of 16 bytes."""
    return all(
        t.is_cuda and t.dtype in _TYPES and t.dim() == 2 and all(n * t.element_size() % ALIGNED == 0 for n in t.shape)
        for t in (left, right)
    )


def multiply(
    left: Tensor,
    right: Tensor,
    left_turned: bool = False,
    right_turned: bool = False,
    bias: Tensor | None = None,
    units: tuple[Tensor, Tensor] | None = None,
    fast: bool = True,
    finish: str = "",
    kept: Tensor | None = None,
) -> Tensor:
    """Return left (M,K) times right (K,N) plus bias (N), in bfloat16. A factor that is `turned` is passed transposed.

    Factors of 8 bits have scales, `units`; `fast` accumulates their products with fewer bits. The library needs the
    left one as it is and the right one transposed.

    `finish` is an epilogue on x = left right + bias: "gelu" returns gelu(x), the tanh approximation, and writes x to
    `kept`; "gelu_slope" returns x gelu'(kept) and takes no bias.
    """
    left, right = _in_rows(left), _in_rows(right)
    M, K = left.shape[::-1] if left_turned else left.shape
    N = right.shape[0] if right_turned else right.shape[1]
    sizes = Sizes(
        M, N, K, (left.dtype, right.dtype), (left_turned, right_turned), (left.stride(0), right.stride(0)),
        bias is not None, units is not None, fast, left.device.index or 0, finish,
    )  # fmt: skip
    out = torch.empty(M, N, dtype=torch.bfloat16, device=left.device)
    _plan(sizes)(left, right, out, bias, units, kept)
    return out


def _in_rows(t: Tensor) -> Tensor:
    """Return a matrix as it is if the library can read it, otherwise a contiguous copy."""
    in_rows = t.stride(1) == 1 and t.stride(0) >= t.shape[1]
    aligned = t.data_ptr() % ALIGNED == 0 and t.stride(0) * t.element_size() % ALIGNED == 0
    return t if in_rows and aligned else t.clone(memory_format=torch.contiguous_format)


def _call(name: str, *arguments: Any) -> None:
    failed = getattr(_library(), name)(*arguments)
    if failed:
        raise CudaError(f"cuBLASLt answered {name} with error {failed}: train with machine.compile='no'.")


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
    """How a matmul is computed: its description, and the algorithm."""

    def __init__(self, sizes: Sizes):
        self.sizes, self.algorithm = sizes, None
        self.description = ctypes.c_void_p()
        _call("cublasLtMatmulDescCreate", ctypes.byref(self.description), _IN_FLOAT32, _FLOAT32)
        first, second, out = sizes.seen()
        self._set(_TURN_A, ctypes.c_int32(first.turned))
        self._set(_TURN_B, ctypes.c_int32(second.turned))
        if sizes.biased or sizes.finish:
            self._set(_EPILOGUE, ctypes.c_int32(_FINISHES[sizes.finish] | (_ADD_BIAS if sizes.biased else 0)))
        if sizes.finish:
            self._set(_KEPT_STEP, ctypes.c_int64(sizes.N))
            self._set(_KEPT_TYPE, ctypes.c_int32(_TYPES[torch.bfloat16]))
        if sizes.biased:
            self._set(_BIAS_TYPE, ctypes.c_int32(_TYPES[torch.bfloat16]))
        if sizes.scaled:
            self._set(_FAST, ctypes.c_int8(sizes.fast))
        kinds = (sizes.types[1], sizes.types[0], torch.bfloat16)
        self.layouts = [_layout(kind, as_seen) for kind, as_seen in zip(kinds, (first, second, out), strict=True)]

    def _set(self, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        _call("cublasLtMatmulDescSetAttribute", self.description, attribute, ctypes.byref(value), size)

    def __call__(
        self,
        left: Tensor,
        right: Tensor,
        out: Tensor,
        bias: Tensor | None = None,
        units: tuple[Tensor, Tensor] | None = None,
        kept: Tensor | None = None,
    ) -> None:
        if bias is not None:
            self._set(_BIAS, ctypes.c_uint64(bias.data_ptr()))
        if kept is not None:
            self._set(_KEPT, ctypes.c_uint64(kept.data_ptr()))
        if units is not None:
            self._set(_B_UNIT, ctypes.c_uint64(units[0].data_ptr()))
            self._set(_A_UNIT, ctypes.c_uint64(units[1].data_ptr()))
        given = (right, left, out)
        if self.algorithm is None:
            offers = self._offers()
            if torch.cuda.is_current_stream_capturing():
                self._run(offers[0], *given)  # nothing can be timed here: the next call will
                return
            self.algorithm = self._fastest(offers, *given)
        self._run(self.algorithm, *given)

    def _run(self, algorithm: Any, first: Tensor, second: Tensor, out: Tensor) -> int:
        one, none, (a, b, c) = ctypes.c_float(1), ctypes.c_float(0), self.layouts
        at = [ctypes.c_void_p(t.data_ptr()) for t in (first, second, out)]
        work = _workspace(self.sizes.device)
        stream = ctypes.c_void_p(torch.cuda.current_stream(out.device).cuda_stream)
        failed: int = _library().cublasLtMatmul(
            _handle(self.sizes.device), self.description, ctypes.byref(one), at[0], a, at[1], b, ctypes.byref(none),
            at[2], c, at[2], c, ctypes.byref(algorithm), ctypes.c_void_p(work.data_ptr()),
            ctypes.c_size_t(WORKSPACE), stream,
        )  # fmt: skip
        return failed

    def _offers(self) -> list[Any]:
        """Return the algorithms, in the order of the heuristic."""
        wish, found, offers = ctypes.c_void_p(), ctypes.c_int32(), (_Offer * OFFERED)()
        _call("cublasLtMatmulPreferenceCreate", ctypes.byref(wish))
        least = [(_FIRST_ALIGNMENT + n, ctypes.c_uint32(ALIGNED)) for n in range(4)]
        for attribute, value in [(_WORKSPACE_BYTES, ctypes.c_uint64(WORKSPACE)), *least]:
            size = ctypes.c_size_t(ctypes.sizeof(value))
            _call("cublasLtMatmulPreferenceSetAttribute", wish, attribute, ctypes.byref(value), size)
        a, b, c = self.layouts
        _call(
            "cublasLtMatmulAlgoGetHeuristic", _handle(self.sizes.device), self.description, a, b, c, c, wish, OFFERED,
            offers, ctypes.byref(found),
        )  # fmt: skip
        _library().cublasLtMatmulPreferenceDestroy(wish)
        if not found.value:
            raise CudaError(f"cuBLASLt has no algorithm for {self.sizes}: train with machine.compile='no'.")
        return [offer.algorithm for offer in offers[: found.value]]

    def _fastest(self, offers: list[Any], *given: Tensor) -> Any:
        working = [algorithm for algorithm in offers if not self._run(algorithm, *given)]
        if not working:
            raise CudaError(f"cuBLASLt refused all its algorithms for {self.sizes}: train with machine.compile='no'.")
        times: list[list[float]] = [[] for _ in working]
        for _ in range(ROUNDS):
            for algorithm, taken in zip(working, times, strict=True):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self._run(algorithm, *given)
                begin.record()
                for _ in range(RUNS):
                    self._run(algorithm, *given)
                end.record()
                end.synchronize()
                taken.append(begin.elapsed_time(end))
        return working[fastest(times)]


def fastest(times: list[list[float]]) -> int:
    """Return the index of the smallest median of some rounds; the first of equals."""
    medians = [sorted(taken)[len(taken) // 2] for taken in times]
    return medians.index(min(medians))


def _layout(kind: torch.dtype, stored: Stored) -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    sizes = (ctypes.c_uint64(stored.rows), ctypes.c_uint64(stored.columns), ctypes.c_int64(stored.step))
    _call("cublasLtMatrixLayoutCreate", ctypes.byref(made), _TYPES[kind], *sizes)
    return made


@cache
def _plan(sizes: Sizes) -> Plan:
    return Plan(sizes)
