"""CUDA C++ compiled at run time by NVRTC, which comes with torch: cached on disk, launched by the driver API."""

import ctypes
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from glassformer.errors import GlassformerError
from glassformer.files import cache_folder, write_atomically

Function = TypeVar("Function", bound=Callable[..., Any])


class CudaError(GlassformerError):
    """An error of CUDA. One sentence."""


@cache
def _compiler() -> Any:
    major = (torch.version.cuda or "").partition(".")[0]
    homes = [p for entry in torch.__path__ for p in Path(entry).parent.glob("nvidia/**/libnvrtc.so*")]
    for name in (f"libnvrtc.so.{major}", "libnvrtc.so", *map(str, sorted(homes))):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CudaError(
        "CUDA's run-time compiler (libnvrtc) was not found: install torch with CUDA, or use engine='torch'."
    )


@cache
def _text(path: Path) -> str:
    return path.read_text()


def source(
    folder: Path, files: Iterable[str], macros: Mapping[str, int], instead: Mapping[str, str] | None = None
) -> str:
    """Return CUDA files of a folder as one text, after #define lines for the macros that they leave open.

    `instead` replaces files by other texts, for the emulation in tests.
    """
    texts = [(instead or {}).get(file) or _text(folder / file) for file in files]
    return "\n".join([*(f"#define {name} {value}" for name, value in macros.items()), *texts])


def code_path(text: str, capability: tuple[int, int]) -> Path:
    """Return the path of the cached machine code of a source."""
    version = (ctypes.c_int * 2)()
    _compiler().nvrtcVersion(ctypes.byref(version), ctypes.byref(version, ctypes.sizeof(ctypes.c_int)))
    mark = hashlib.sha256(f"{text}{capability}{list(version)}".encode()).hexdigest()[:16]
    return cache_folder() / "cuda" / f"{mark}.cubin"


def is_available() -> bool:
    """Return whether the run-time compiler can be loaded. PyTorch for GPUs of other vendors comes without it."""
    try:
        return _compiler() is not None
    except CudaError:
        return False


def constant(function: Function) -> Function:
    """Mark a function whose result is a constant for torch.compile.

    `torch.compiler.assume_constant_result` sets the same attribute, but first imports torch's compiler: half of the
    time to a first token.
    """
    setattr(function, "_dynamo_marked_constant", True)  # noqa: B010
    return function


@constant
def can_launch() -> bool:
    """Return whether this machine can compile and run kernels: the answer is a constant for torch.compile."""
    return torch.cuda.is_available() and torch.version.cuda is not None and is_available()


def architecture(capability: tuple[int, int]) -> str:
    """Return the compiler's name of an architecture; Hopper needs sm_90a for its tensor core instructions."""
    return f"sm_{capability[0]}{capability[1]}{'a' if capability == (9, 0) else ''}"


def compiled(text: str, capability: tuple[int, int]) -> bytes:
    """Return machine code for a GPU, from the cache if it was compiled before."""
    path = code_path(text, capability)
    if path.exists():
        return path.read_bytes()
    made = _compile(_compiler(), text, [f"--gpu-architecture={architecture(capability)}", "--std=c++17"])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, made)
    return made


def _compile(compiler: Any, text: str, options: list[str]) -> bytes:
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    compiler.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = compiler.nvrtcCompileProgram(program, len(options), given)
    if failed:
        compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        compiler.nvrtcGetProgramLog(program, log)
        lines = log.value.decode(errors="replace").splitlines()
        reason = next((line for line in lines if "error" in line), f"error {failed}")
        raise CudaError(
            f"CUDA could not compile a kernel ({reason.strip()}): report it with the output of `glass env`."
        )
    compiler.nvrtcGetCUBINSize(program, ctypes.byref(size))
    made = ctypes.create_string_buffer(size.value)
    compiler.nvrtcGetCUBIN(program, made)
    compiler.nvrtcDestroyProgram(ctypes.byref(program))
    return made.raw


_MOST_SHARED, _SHARE_OF_SHARED = 8, 9
"""CU_FUNC_ATTRIBUTE_: MAX_DYNAMIC_SHARED_SIZE_BYTES, PREFERRED_SHARED_MEMORY_CARVEOUT (percent)."""
_COOPERATIVE, _CLUSTER, _EARLY = 2, 4, 6
"""CU_LAUNCH_ATTRIBUTE_: COOPERATIVE, CLUSTER_DIMENSION, PROGRAMMATIC_STREAM_SERIALIZATION."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, then at offset 8 a value of 64 bytes."""

    _fields_ = [("number", ctypes.c_uint64), ("value", ctypes.c_uint32 * 3), ("rest", ctypes.c_uint32 * 13)]


class _Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *((f"{what}_{axis}", ctypes.c_uint32) for what in ("blocks", "threads") for axis in "xyz"),
        ("shared", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint32),
    ]


class Map(ctypes.Structure):
    """CUtensorMap: the description of a matrix for the tensor memory accelerator (Hopper and later)."""

    _fields_ = [("word", ctypes.c_uint64 * 16)]


def is_plain(t: Tensor) -> bool:
    """Return whether a kernel can read t by its address: an unsharded, contiguous float32 tensor on a GPU."""
    unsharded = type(t.data) is Tensor  # a shard is a DTensor
    return unsharded and t.is_cuda and t.dtype is torch.float32 and t.is_contiguous()


def addresses(tensors: Sequence[Tensor], room: int) -> ctypes.Array[ctypes.c_void_p]:
    """Return the addresses of up to `room` tensors, for a field of an arguments struct."""
    return (ctypes.c_void_p * room)(*(t.data_ptr() for t in tensors))


def address(number: Tensor | None) -> int | None:
    """Return the address of a float32 number on the device; None for none."""
    if number is None:
        return None
    assert number.dtype is torch.float32
    assert number.numel() == 1
    return number.data_ptr()


_BFLOAT16, _PLAIN, _SWIZZLED_128, _TO_L2_BY_256 = 9, 0, 3, 3
"""CU_TENSOR_MAP_: DATA_TYPE_BFLOAT16, INTERLEAVE_NONE, SWIZZLE_128B, L2_PROMOTION_L2_256B."""


def tensor_map(matrix: Tensor, rows: int) -> Map:
    """Return the map of a bfloat16 matrix for boxes of `rows` x 64 columns with the 128-byte swizzle."""
    return _tensor_map(matrix.data_ptr(), *matrix.shape, matrix.stride(0), rows)


@lru_cache(1024)  # steps outside a CUDA graph use the same addresses again
def _tensor_map(address: int, height: int, width: int, stride: int, rows: int) -> Map:
    room = ctypes.create_string_buffer(2 * ctypes.sizeof(Map))
    at = -(-ctypes.addressof(room) // 64) * 64  # the driver requires 64-byte alignment
    sizes, step = (ctypes.c_uint64 * 2)(width, height), (ctypes.c_uint64 * 1)(2 * stride)
    box, every = (ctypes.c_uint32 * 2)(64, rows), (ctypes.c_uint32 * 2)(1, 1)
    _call(
        "cuTensorMapEncodeTiled", ctypes.c_void_p(at), _BFLOAT16, 2, ctypes.c_void_p(address), sizes, step,
        box, every, _PLAIN, _SWIZZLED_128, _TO_L2_BY_256, 0,
    )  # fmt: skip
    return Map.from_buffer_copy(ctypes.string_at(at, ctypes.sizeof(Map)))


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    failed = getattr(_driver(), name)(*arguments)
    if failed:
        message = ctypes.c_char_p()
        _driver().cuGetErrorString(failed, ctypes.byref(message))
        reason = (message.value or b"?").decode()
        raise CudaError(f"CUDA answered {name} with {reason!r} (error {failed}): use engine='torch'.")


class Kernel:
    """A function of compiled code on the current device. Its only argument is a structure, passed by value."""

    def __init__(self, code: bytes, name: str, shared: int = 0, in_chain: bool = False):
        """`shared`: bytes of dynamic shared memory of each launch.

        `in_chain`: other kernels start before this one ends. A processor runs two kernels at a time only if it divides
        its memory into L1 and shared memory in the same way for both: as much shared memory as possible.
        """
        torch.cuda.current_stream()  # creates the CUDA context
        self.shared = shared
        self.module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        _call("cuModuleLoadData", ctypes.byref(self.module), code)
        _call("cuModuleGetFunction", ctypes.byref(self.function), self.module, name.encode())
        if shared:
            _call("cuFuncSetAttribute", self.function, _MOST_SHARED, shared)
        if in_chain:
            _call("cuFuncSetAttribute", self.function, _SHARE_OF_SHARED, 100)

    def launch(
        self,
        given: ctypes.Structure,
        blocks: int,
        threads: int,
        together: bool = False,
        cluster: int = 1,
        early: bool = False,
    ) -> None:
        """Launch the kernel on the current stream.

        `together`: cooperative launch (all blocks resident at once, or an error), for blocks that wait for each other.
        `cluster`: number of blocks per thread block cluster.
        `early`: the kernel may start before the last one has ended; it waits for it itself (compute capability 9).
        """
        arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(given), ctypes.c_void_p))
        choices = (
            (together, _COOPERATIVE, (1,)),
            (cluster > 1, _CLUSTER, (cluster, 1, 1)),
            (early, _EARLY, (1,)),
        )
        set_attributes = [_Attribute(number, value) for wanted, number, value in choices if wanted]
        attributes = (_Attribute * len(set_attributes))(*set_attributes)
        stream = torch.cuda.current_stream().cuda_stream
        shape = _Launch(blocks, 1, 1, threads, 1, 1, self.shared, stream, attributes, len(set_attributes))
        _call("cuLaunchKernelEx", ctypes.byref(shape), self.function, arguments, None)

    def most_clusters(self, cluster: int, threads: int) -> int:
        """Return how many clusters of blocks of `threads` threads run at once."""
        found, attributes = ctypes.c_int(), (_Attribute * 1)(_Attribute(_CLUSTER, (cluster, 1, 1)))
        shape = _Launch(cluster, 1, 1, threads, 1, 1, self.shared, None, attributes, 1)
        _call("cuOccupancyMaxActiveClusters", ctypes.byref(found), self.function, ctypes.byref(shape))
        return found.value


@cache
def kernel(text: str, name: str, device: int, shared: int = 0, in_chain: bool = False) -> Kernel:
    """Return a kernel, compiled and loaded once per source and device."""
    with torch.cuda.device(device):
        return Kernel(compiled(text, torch.cuda.get_device_capability(device)), name, shared, in_chain)
