"""The launches of a decode step of one sequence as a program, which one launch runs for many steps (step.cu).

It is for weights in 8 bits: with twice as many, a graph of kernels is faster (docs/benchmarks_history.md).
"""

import ctypes
import dataclasses
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from glassformer.kernels.cuda.graph import attend, launches
from glassformer.kernels.cuda.graph.launches import (
    ARGUMENTS,
    COMMON,
    FOLDER,
    OUTPUTS,
    SHARED_MEMORY,
    Launch,
)
from glassformer.kernels.toolchain import nvrtc

KINDS = {"linear": 0, "attend": 1, "embed": 2, "add_norm": 3, "choose": 4}
"""The kernels that the program has, as step.cu numbers them."""
PIECE, STAGE = 32 * 16, 8 * 32 * 16
"""Bytes of a row that a warp requests at a time, and of the 8 rows of a tile."""
FEWEST_STAGES = 2
FEWEST_BYTES = 8 * 2**20
"""Weights per instruction, without the head, from which a program is faster than a graph (benchmarks_history.md)."""
MOST_SPLITS = 4
"""Blocks that share the keys of a head, unless the cache is long: every block merges their results."""
ROUNDS = 5
"""Keys that a thread requests at a time, the first ones before the projections of the token are complete."""
OF_ALL = ("STORED", "OPERAND_IS_BF16", "DYNAMIC_BYTES")
"""Macros of attention that a program defines once."""
GIVEN = max(ctypes.sizeof(ARGUMENTS[file]) for file in ("linear", "attend", "vectors"))
INSTRUCTION = 48 + GIVEN
ENTRY = 56


@dataclass(frozen=True)
class Program:
    """Steps of one sequence. `run` launches any number of them."""

    macros: Mapping[str, int]
    variants: tuple[Mapping[str, int], ...]
    """The macros of attention, for each way in which layers attend."""
    blocks: int
    shared: int
    """Bytes of dynamic shared memory of a block."""
    instructions: Tensor
    entries: Tensor
    counter: Tensor
    count: int
    held: tuple[object, ...]
    """What the instructions refer to by address."""

    @property
    def threads(self) -> int:
        """One warp waits for the other blocks."""
        return 32 * (launches.WARPS + 1)

    def arguments(self, steps: int) -> ctypes.Structure:
        made = ARGUMENTS["step"]()
        made.program, made.entries = self.instructions.data_ptr(), self.entries.data_ptr()
        made.counter, made.instructions, made.steps = self.counter.data_ptr(), self.count, steps
        return made

    def text(self, instead: Mapping[str, str] | None = None) -> str:
        """The source. `instead` replaces files by other texts, for the emulation in tests."""
        return _text(self.macros, self.variants, instead)

    @cached_property
    def kernel(self) -> nvrtc.Kernel:
        """The kernel on the device of the weights, compiled and loaded at its first use."""
        return nvrtc.kernel(self.text(), "step", self.counter.device.index, self.shared)

    def run(self, steps: int) -> None:
        """Launch some steps on the current stream of the device of the weights; it need not be the current device."""
        with torch.cuda.device(self.counter.device):
            self.counter.zero_()
            self.kernel.launch(self.arguments(steps), self.blocks, self.threads, together=True)


def make_program(operations: Sequence[object], long: bool, processors: int, device: torch.device) -> Program | None:
    """Return the program of the operations of a step, or None if they cannot all be its instructions, or are too small.

    `long`: the cache is so long that reading it takes longer than merging the results of more blocks.
    """
    made = [op for op in operations if isinstance(op, Launch) and op.kernel in KINDS and not op.macros.get("EXPERTS")]
    if len(made) < len(operations) or _weight_bytes(made) < FEWEST_BYTES * len(made):
        return None
    variants: list[dict[str, int]] = []
    for launch in made:
        if launch.kernel == "attend" and (macros := _variant(launch, long)) not in variants:
            variants.append(macros)
    widest = max(launch.macros["INNER"] for launch in made if launch.kernel == "linear")
    matmuls = sum(launch.kernel == "linear" for launch in made)
    warps = launches.WARPS
    fixed = matmuls * ENTRY + 2 * INSTRUCTION + 2 * widest + 384 * warps + 512
    static = sum(attend.shared_bytes(macros) for macros in variants)
    stages = (SHARED_MEMORY - static - fixed) // (warps * STAGE)
    if stages < FEWEST_STAGES:
        return None
    shared = fixed + warps * stages * STAGE
    norms = [launch.macros["INNER"] for launch in made if launch.macros.get("NORM", -1) >= 0]
    macros = {
        **_number_formats(made), "WARPS": warps, "WHOLE_STEP": 1, "DYNAMIC_BYTES": shared, "STAGES": stages,
        "ENTRIES": matmuls, "FLOATS": -(-max(norms, default=4) // (128 * warps)), "WIDEST": widest, "GIVEN": GIVEN,
        "MOST_SPLITS": max((m["SPLITS"] for m in variants), default=1),
        "HEAD_FLOATS": max((-(-m["H"] * m["U"] // (128 * warps)) for m in variants), default=1),
    }  # fmt: skip
    entries, instructions, partial = _encode(made, variants, long, processors, device)
    return Program(
        macros, tuple(variants), processors, shared, _bytes(instructions, device), _bytes(entries, device),
        torch.zeros((), dtype=torch.int32, device=device), len(instructions), (*made, partial),
    )  # fmt: skip


def _weight_bytes(made: Sequence[Launch]) -> int:
    """Return the bytes of all matrices but the head, which is large even in small models."""
    layers = [launch for launch in made if launch.macros.get("OUT", OUTPUTS["logits"]) != OUTPUTS["logits"]]
    given: list[Any] = [launch.given["weight"] for launch in layers]
    return sum(matrix.numel() * matrix.element_size() for weights in given for matrix in weights)


def _number_formats(made: Sequence[Launch]) -> dict[str, int]:
    """Return the macros of number formats that all launches share; STORED is that of the model and its cache."""
    linear = next(launch for launch in made if launch.kernel == "linear")
    stored = next(launch.macros["STORED"] for launch in made if launch.file == "vectors")
    return {
        "OPERAND_IS_BF16": linear.macros["OPERAND_IS_BF16"], "WEIGHTS": linear.macros["WEIGHTS"], "STORED": stored,
    }  # fmt: skip


def _variant(launch: Launch, long: bool) -> dict[str, int]:
    """Return the macros of attention, without those of number formats, with fewer blocks for each head."""
    splits = launch.macros["SPLITS"] if long else min(launch.macros["SPLITS"], MOST_SPLITS)
    macros = {**launch.macros, "SPLITS": splits, "ROUNDS": ROUNDS if launch.macros["HEADS"] == 1 else 4}
    return {name: value for name, value in macros.items() if name not in OF_ALL}


def _text(macros: Mapping[str, int], variants: Sequence[Mapping[str, int]], instead: Mapping[str, str] | None) -> str:
    """Return the source: each file in a namespace of its own, attention once for each variant."""

    def part(file: str) -> str:
        return nvrtc.source(FOLDER, (file,), {}, instead)

    texts = [nvrtc.source(FOLDER, COMMON, macros, instead)]
    for name, file in (("matmul", "matmul.cuh"), ("vectors", "vectors.cu")):
        texts += [f"namespace {name} {{", part(file), "}"]
    for number, variant in enumerate(variants):
        texts += [f"#define {name} {value}" for name, value in variant.items()]
        texts += [f"namespace attend_{number} {{", part("attend.cu"), "}"]
        texts += [f"#undef {name}" for name in variant]
    texts.append("template <typename Wait>\n__device__ inline void attend_variant(")
    texts.append("    int variant, const void* given, float* partial, Wait wait) {")
    for n in range(len(variants)):
        call = f"attend_{n}::attend_items(*(const attend_{n}::Arguments*)given, partial, wait)"
        texts.append(f"    if (variant == {n}) {call};")
    return "\n".join([*texts, "}", part("step.cu")])


def _encode(
    made: Sequence[Launch], variants: Sequence[Mapping[str, int]], long: bool, processors: int, device: torch.device
) -> tuple[list[bytes], list[bytes], Tensor]:
    """Return entries and instructions as step.cu reads them, and the buffer between attention and the next matmul."""
    most = max((v["SPLITS"] * v["H"] * (v["U"] + 2) for v in variants), default=1)
    partial = torch.zeros(most, device=device)
    entries: list[bytes] = []
    instructions: list[bytes] = []
    attended: tuple[object, int, int] = (None, 0, 0)
    for launch in made:
        m, number, splits, width, variant = launch.macros, 0, 0, 0, 0
        if launch.kernel == "attend":
            variant = variants.index(_variant(launch, long))
            attended = (launch.given["out"], variants[variant]["SPLITS"], m["U"])
        elif launch.kernel == "linear":
            number = len(entries)
            entries.append(_entry(launch, processors))
            if launch.given["x"] is attended[0]:
                _, splits, width = attended
        header = (
            KINDS[launch.kernel], m.get("INNER", 0), m.get("NORM", -1), m.get("OUT", 0), m.get("ACTIVATION", 0),
            number, splits, width, variant, 0,
        )  # fmt: skip
        given = bytes(_with_embedding(launch, made[0]).arguments()).ljust(GIVEN, b"\0")
        instructions.append(struct.pack("<10iQ", *header, partial.data_ptr()) + given)
    return entries, instructions, partial


def _with_embedding(launch: Launch, first: Launch) -> Launch:
    """Return a launch. The choice of a token also has what the embedding of that token needs."""
    if launch.kernel != "choose":
        return launch
    read = {name: first.given[name] for name in ("table", "positions", "scale")}
    return dataclasses.replace(launch, given={**launch.given, **read})


def _entry(launch: Launch, processors: int) -> bytes:
    """Return what is needed to request the weights of a matmul: as many warps share a unit as keep a block busy."""
    m = launch.macros
    weights: Any = launch.given["weight"]
    addresses = [w.data_ptr() for w in weights] + [0] * (3 - len(weights))
    rows, gated = [m["ROWS0"], m["ROWS1"], m["ROWS2"]], m["OUT"] == OUTPUTS["gated"]
    units = -(-(rows[0] if gated else sum(rows)) // 8)
    row_bytes = m["INNER"] * (1 if m["WEIGHTS"] else 2)
    each, pieces = -(-units // processors), -(-row_bytes // PIECE)
    choices = [n for n in (1, 2, 4, 8) if n <= min(launches.WARPS, pieces)]
    sharing = next((n for n in choices if n * each >= launches.WARPS), choices[-1])
    return struct.pack("<3Q8i", *addresses, *rows, row_bytes, units, int(gated), sharing.bit_length() - 1, 0)


def _bytes(parts: Sequence[bytes], device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8).to(device)
