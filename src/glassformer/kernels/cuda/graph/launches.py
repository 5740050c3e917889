"""The sources of the kernels of a step, their arguments, and one launch of each."""

import ctypes
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from glassformer.kernels.toolchain import nvrtc

COMMON = ("machine.cuh", "numbers.cuh")
FOLDER = Path(__file__).parent
HEADERS = {"linear": ("matmul.cuh",)}
"""Further files before a file."""
WARPS = 8
"""Warps of 32 threads in a block of every kernel."""
SHARED_MEMORY = 232448
"""Bytes of shared memory that a block may have on a GPU of compute capability 9.0."""
WEIGHTS = {"bfloat16": 0, "float16": 0, "int8": 1, "fp8": 2}
"""Number formats of the weights, as linear.cu numbers them."""
STORED = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
OUTPUTS = {"float": 0, "activation": 1, "gated": 2, "add": 3, "logits": 4}
"""What follows a matmul, as linear.cu numbers it."""


def _structure(name: str, pointers: str, floats: str, integers: str, longs: str = "") -> type[ctypes.Structure]:
    """Return the mirror of a struct of pointers, then long longs, floats and ints. `x:3` is an array of three."""

    def fields(names: str, kind: Any) -> list[tuple[str, Any]]:
        split = [field.partition(":") for field in names.split()]
        return [(field, kind * int(count) if count else kind) for field, _, count in split]

    members = fields(pointers, ctypes.c_void_p) + fields(longs, ctypes.c_int64)
    members += fields(floats, ctypes.c_float) + fields(integers, ctypes.c_int32)
    return type(name, (ctypes.Structure,), {"_fields_": members})


ARGUMENTS = {
    "linear": _structure(
        "LinearArguments",
        "x weight:3 scale:3 bias:3 norm_weight norm_bias out best choice squares next_weight normed squares_out",
        "eps factor softcap limit up_offset",
        "slots",
    ),
    "attend": _structure(
        "AttendArguments",
        "qkv q_weight q_bias k_weight k_bias cosines sines slopes sinks keys values out slot start",
        "scale eps softcap clip",
        "capacity window",
    ),
    "vectors": _structure(
        "VectorArguments",
        "token next history slot start table positions stream branch weight bias normed best gates experts",
        "scale eps",
        "width columns centred slots is_last",
    ),
    "prompt": _structure(
        "PromptArguments",
        "projected:3 prepared:3 norm_weight:2 norm_bias:2 x out up weight bias cosines sines",
        "norm_eps:2 norm_offset:2 eps offset scale clip limit up_offset",
        "heads:3 first_block:3 tokens own_waves",
        "count row_step:3 sequence_step:3 token_step:3 head_step:3",
    ),
    "step": _structure("StepArguments", "program entries counter", "", "instructions steps"),
}
"""The argument of the kernels of each source file; mirrors its struct `Arguments`."""


@dataclass(frozen=True)
class Launch:
    """A kernel with its arguments. `given` names members of the struct; a tensor stands for its address."""

    file: str
    kernel: str
    macros: Mapping[str, int]
    given: Mapping[str, object]
    blocks: int
    cluster: int = 1
    shared: int = 0
    """Bytes of dynamic shared memory of a block."""

    def text(self, instead: Mapping[str, str] | None = None) -> str:
        """The source for this launch. `instead` replaces files by other texts, for the emulation in tests."""
        macros = (("WARPS", WARPS), *self.macros.items())
        return _text(self.file, macros) if instead is None else _joined(self.file, macros, instead)

    def arguments(self) -> ctypes.Structure:
        made = ARGUMENTS[self.file]()
        for name, value in self.given.items():
            if isinstance(value, list | tuple):
                for i, one in enumerate(value):
                    getattr(made, name)[i] = _address(one)
            else:
                setattr(made, name, _address(value))
        return made

    def run(self) -> None:
        """Launch the kernel on the current stream. It may start before the kernel launched before it has ended."""
        kernel = nvrtc.kernel(self.text(), self.kernel, torch.cuda.current_device(), self.shared, in_chain=True)
        kernel.launch(self.arguments(), self.blocks, 32 * WARPS, cluster=self.cluster, early=True)


def _joined(file: str, macros: Iterable[tuple[str, int]], instead: Mapping[str, str] | None = None) -> str:
    return nvrtc.source(FOLDER, (*COMMON, *HEADERS.get(file, ()), f"{file}.cu"), dict(macros), instead)


_text = lru_cache(1024)(_joined)
"""The same string for the same launch: prompts launch kernels one by one, and a string keeps its hash."""


def _address(value: object) -> object:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


FITTING = {1: 1.0, 2: 1.0, 4: 0.94, 8: 0.92}
"""The share of the processors that clusters of so many blocks fit on: they do not extend over parts of the GPU."""


def most_clusters(size: int, processors: int) -> int:
    """Return how many clusters of `size` blocks run at once, with a block on each processor."""
    return max(1, int(processors / size * FITTING[size]))
