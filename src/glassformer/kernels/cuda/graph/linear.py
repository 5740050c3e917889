"""Matmuls of a decode step (linear.cu): how the rows are distributed, and weights in 8 bits."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.kernels.cuda.graph import launches
from glassformer.kernels.cuda.graph.launches import OUTPUTS, SHARED_MEMORY, WEIGHTS, Launch
from glassformer.model.layers import ACTIVATIONS, LayerNorm, RMSNorm
from glassformer.shapes import Float

ACTIVATION_NAMES = ("relu", "gelu", "gelu_tanh", "silu", "relu2", "tanh", "quick_gelu")
"""In the order of their numbers in numbers.cuh."""
CHUNK = 64
"""Columns that a warp reads at a time: the inner dimension is a multiple of it."""
LARGEST_BATCH = 64
"""Vectors that the kernel multiplies at once."""
CLUSTERS = (1, 2, 8)
"""Blocks that may share the columns of a matmul of many vectors. Clusters of four were slow (benchmarks_history.md)."""
FUSED_NORM = 2
"""Up to so many vectors every block normalizes them itself; more are normalized once."""
FEW = 16
"""Vectors up to which the kernel is faster than cuBLAS for every shape (docs/benchmarks_history.md)."""
UNDIVIDED = 3
"""The norm of operands that an RMS norm has yet to divide."""
LOADS = {16: 20, LARGEST_BATCH: 12}
"""Loads of 16 bytes that a thread keeps in flight, for up to so many vectors."""
ALONE = SHARED_MEMORY // 2 + 2048
"""Bytes of shared memory of which no two blocks fit a processor.

The blocks of a matmul start where there is room, next to those of the kernel before. If these are not equally many on
all processors, some get two blocks of the matmul, which then takes twice as long. So they are made too large for that.
"""


def ceil_div(a: int, b: int) -> int:
    return (a + b - 1) // b


@dataclass(frozen=True)
class Operand:
    """A matrix (rows, columns) as the kernel reads it."""

    weight: Tensor
    bias: Float[Tensor, "rows"] | None = None
    scale: Float[Tensor, "rows"] | None = None
    """Of a quantised matrix: what each row is multiplied with."""


def operand(weight: Tensor, bias: Tensor | None, precision: str) -> Operand:
    """Return a matrix in the number format `precision`; bfloat16 and float16 are the stored weights themselves."""
    bias = None if bias is None else bias.detach().float()
    weight = weight.detach()
    if not WEIGHTS[precision]:
        return Operand(weight, bias)
    quantised, scale = quantise(weight, precision)
    return Operand(quantised, bias, scale)


def quantise(weight: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    """Return a matrix in 8 bits with one scale per row. Bytes of int8 are stored with 128 added."""
    rows = weight.float()
    largest = rows.abs().amax(1).clamp(min=1e-30)
    if precision == "fp8":
        scale = largest / 448  # the largest number of float8 e4m3
        return (rows / scale[:, None]).to(torch.float8_e4m3fn).view(torch.uint8), scale
    scale = largest / 127
    return ((rows / scale[:, None]).round() + 128).to(torch.uint8), scale


@dataclass(frozen=True)
class Shape:
    """What a matmul is compiled for."""

    batch: int
    """Vectors, of each pair of a vector and an expert 1."""
    rows: tuple[int, ...]
    columns: int
    out: str
    precision: str
    activation: int | None = None
    norm: int = -1
    """-1: x are operands. 0: x is the residual stream. 1, 2: its RMS norm, its layer norm. 3: see `before_norm`."""
    experts: bool = False

    @property
    def loads(self) -> int:
        """Loads of 16 bytes per tile and chunk."""
        return 1 if WEIGHTS[self.precision] else 2

    def plan(self, processors: int) -> "Plan | None":
        """Return how the matmul is distributed, or None if cuBLAS is to compute it.

        As few blocks share the columns as their memory allows. If no number of them does, the vectors are read from L1,
        which is slow: cuBLAS is faster, but it has no weights in 8 bits with a scale.
        """
        if self.batch > LARGEST_BATCH:
            return None
        reads_all = self.experts or self.norm in (0, 1, 2)  # a block normalizes all columns
        sizes = (1,) if reads_all else CLUSTERS
        tiles = (2,) if self.out == "gated" else (2, 1)
        made = [Plan.of(self, n, size, processors) for size in sizes for n in tiles]
        fits = [plan for plan in made if plan.shared <= SHARED_MEMORY]
        chosen = min(fits, key=lambda plan: (plan.cluster, *plan.work), default=None)
        if WEIGHTS[self.precision]:
            return chosen or Plan.of(self, tiles[-1], 1, processors, in_shared=False)
        if chosen is None or self.batch <= FEW:
            return chosen
        return None if chosen.cluster > 2 or (self.out == "gated" and self.batch > 32) else chosen

    def macros(self, plan: "Plan") -> dict[str, int]:
        rows = (*self.rows, 0, 0)
        made = {
            "OPERAND_IS_BF16": int(self.precision == "bfloat16"), "STORED": 0, "INNER": self.columns,
            "ROWS0": rows[0], "ROWS1": rows[1], "ROWS2": rows[2], "TILES": plan.tiles, "B": self.batch,
            "VECTORS": -(-self.batch // 16), "DEPTH": plan.depth, "WEIGHTS": WEIGHTS[self.precision],
            "NORM": self.norm, "OUT": OUTPUTS[self.out], "EXPERTS": int(self.experts),
            "CLUSTER": plan.cluster, "CLUSTERS": plan.clusters, "SPLIT": plan.split, "DYNAMIC_BYTES": plan.shared,
            "IN_SHARED": int(plan.in_shared),
        }  # fmt: skip
        return made if self.activation is None else {**made, "ACTIVATION": self.activation}


@dataclass(frozen=True)
class Plan:
    """How a matmul is distributed over the processors: one block for each, and in a block over its warps."""

    tiles: int
    """Tiles of 8 rows that a warp computes together: a unit."""
    split: int
    """Warps of a block that share a unit: as many as keep all of them busy."""
    depth: int
    """Chunks of columns that a warp requests ahead."""
    cluster: int
    """Blocks that share the columns."""
    clusters: int
    in_shared: bool
    """The vectors lie in shared memory."""
    shared: int
    """Bytes of shared memory of a block, at most."""
    work: tuple[int, int]
    """Tiles of the busiest block, and of its busiest warps."""

    @classmethod
    def of(cls, shape: Shape, tiles: int, cluster: int, processors: int, in_shared: bool = True) -> "Plan":
        rows, of_unit = (shape.rows[0], 8) if shape.out == "gated" else (sum(shape.rows), 8 * tiles)
        units, chunks = ceil_div(rows, of_unit), ceil_div(shape.columns // CHUNK, cluster)
        clusters = min(units, launches.most_clusters(cluster, processors))
        each, warps = ceil_div(units, clusters), launches.WARPS
        split = next((n for n in (1, 2, 4) if n * each >= warps), warps)
        groups = warps // split
        depth = next(loads for most, loads in LOADS.items() if shape.batch <= most) // (tiles * shape.loads)
        sums = 128 * ceil_div(shape.batch, 16) * tiles * (4 if shape.batch > 8 else 2)  # bytes of a unit
        partial = groups * (split - 1) * sums
        vectors = 2 * (chunks * CHUNK + (8 if WEIGHTS[shape.precision] else 32)) if in_shared else 0
        ring = 512 * warps * depth * tiles * shape.loads
        shared = ring + shape.batch * (vectors + 8 * warps + 12) + 256 + (each * sums if cluster > 1 else 0)
        shared += 2 * partial if 2 * partial <= 24576 else partial
        shared = shared if shape.experts else max(shared, ALONE)  # experts have many blocks for each processor
        work = each * tiles, ceil_div(each, groups) * tiles
        return cls(tiles, split, depth, cluster, clusters, in_shared, shared, work)


def linear(
    x: Tensor, matrices: Sequence[Operand], shape: Shape, out: Tensor, processors: int,
    norm: "NormFactors | None" = None, **more: object,
) -> Launch:  # fmt: skip
    """Return the launch of out = W x for one or several matrices that share x."""
    given: dict[str, object] = {
        "x": x, "out": out, "factor": 1.0, "slots": 1,
        "weight": [m.weight for m in matrices], "bias": [m.bias for m in matrices],
        "scale": [m.scale for m in matrices], **more,
    }  # fmt: skip
    plan = shape.plan(processors)
    assert plan is not None
    macros, blocks = shape.macros(plan), plan.cluster * plan.clusters
    if norm is not None:
        given |= {"norm_weight": norm.weight, "norm_bias": norm.bias, "eps": norm.eps, "squares": norm.squares}
        macros |= {} if norm.squares is None else {"PRODUCERS": norm.squares.shape[1]}
    return Launch("linear", "linear", macros, given, blocks, plan.cluster, plan.shared)


def library_matmul(
    x: Tensor, matrices: Sequence[Operand], out: str, into: Tensor, activation: int | None, more: Mapping[str, Any]
) -> Callable[[], None]:
    """Return a function that computes the same as `linear` by cuBLAS and torch."""
    act = None if activation is None else ACTIVATIONS[ACTIVATION_NAMES[activation]]
    biases = [None if m.bias is None else m.bias.to(x.dtype) for m in matrices]
    splits = [m.weight.shape[0] for m in matrices]

    def compute() -> None:
        found = [F.linear(x, m.weight, bias) for m, bias in zip(matrices, biases, strict=True)]
        match out:
            case "float":
                for part, y in zip(into.split(splits, 1), found, strict=True):
                    part.copy_(y)
            case "activation":
                assert act is not None
                into.copy_(act(found[0]))
            case "gated":
                assert act is not None
                gate, up = found
                if more.get("limit"):
                    gate, up = gate.clamp(max=more["limit"]), up.clamp(-more["limit"], more["limit"])
                torch.mul(act(gate), up + more["up_offset"] if more.get("up_offset") else up, out=into)
            case "add":
                into.add_(found[0], alpha=more["factor"])
            case "logits":
                into.copy_(found[0])
                if more["factor"] != 1:
                    into.mul_(more["factor"])
                if more["softcap"]:
                    into.div_(more["softcap"]).tanh_().mul_(more["softcap"])
                more["best"].copy_(ordered_argmax(into))
            case _:
                raise ValueError(out)

    return compute


def ordered_argmax(logits: Tensor) -> Tensor:
    """Return the argmax of each row as `choose` reads it (vectors.cu): 2^32 - 1 - index in the low 32 bits."""
    return 0xFFFFFFFF - logits.argmax(-1)


@dataclass(frozen=True)
class NormFactors:
    """A norm as the kernels read it: float32, the offset added to the weight."""

    kind: int
    """0: none. 1: RMS norm. 2: layer norm."""
    eps: float = 0.0
    weight: Tensor | None = None
    bias: Tensor | None = None
    squares: Float[Tensor, "B blocks"] | None = None
    """Sums of squares that the blocks of the kernel before wrote, if the weight is applied already."""


def adds_to_stream(launch: Launch) -> bool:
    """Return whether a launch adds to the stream, in bfloat16: numbers that are not yet divided need its range."""
    return launch.macros.get("OUT") == OUTPUTS["add"] and launch.macros["OPERAND_IS_BF16"] == 1


def before_norm(launch: Launch, norm: NormFactors, normed: Tensor) -> tuple[Launch, NormFactors]:
    """Let a matmul that adds to the stream write what an RMS norm needs. Return it, and what is left of the norm."""
    squares = torch.zeros(normed.shape[0], launch.blocks, device=normed.device)
    given = {**launch.given, "next_weight": norm.weight, "normed": normed, "squares_out": squares}
    made = dataclasses.replace(launch, macros={**launch.macros, "BEFORE_NORM": 1}, given=given)
    return made, NormFactors(UNDIVIDED, norm.eps, squares=squares)


def norm_factors(module: nn.Module | None) -> NormFactors:
    """Read a norm of the model; None and `Unchanged` are no norm."""
    if not isinstance(module, LayerNorm | RMSNorm):
        return NormFactors(0)
    weight = None if module.weight is None else (module.weight.detach().float() + module.offset).contiguous()
    bias = None if module.bias is None else module.bias.detach().float()
    return NormFactors(2 if isinstance(module, LayerNorm) else 1, module.eps, weight, bias)


def suits(module: nn.Module | None, dtype: torch.dtype) -> bool:
    """Return whether a layer is a plain linear layer that the kernel can read: no adapter, no 4-bit weights."""
    if type(module) is not nn.Linear:
        return False
    weight = module.weight
    fits = weight.shape[1] % CHUNK == 0 and weight.is_contiguous() and weight.data_ptr() % 16 == 0
    return weight.dtype is dtype and fits
