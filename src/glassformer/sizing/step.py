"""Memory of the optimizer and the training loop: optimizer states, averaged weights, cast weights, temporaries.

`StepOptions()` is the plain step that `memory` describes. A run of `glass train` differs from it: matmuls under
autocast, averaged weights, accumulated gradients, head and loss in chunks, evaluation between steps.
`training.forecast` fills in these options from a run file.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import assert_never, get_args

from glassformer.config import ModelConfig
from glassformer.config.choices import Recompute
from glassformer.config.optimizer import SizedOptimizer as Optimizer
from glassformer.config.optimizer import rule_for

BYTES: dict[str, float] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "int4": 0.5}
"""Bytes per number. int8 and int4 apply to weights only: activations and KV cache then count as bfloat16."""

CHUNKED_FROM = 4096
"""Vocabulary from which on training computes head and loss in chunks."""
CHUNK_BYTES = 2**32
"""Limit of a chunk: of its logits in float32, or where plain torch makes copies of them, of everything."""
FROZEN_ROWS = 512
"""Rows of a chunk of a frozen head on a CPU."""
KERNEL_LOGIT, PLAIN_LOGIT = 4, 19
"""Bytes alive for each bfloat16 logit of a chunk. A kernel has the logit and its gradient. Plain torch has float32
logits, probabilities, a mask, one-hot targets and the difference as well."""


@dataclass(frozen=True)
class StepOptions:
    """Differences between a training loop and the plain step of `memory`."""

    matmuls: str | None = None
    """Dtype of matmuls and their inputs under autocast, with weights and gradients in the dtype of the model."""
    residual: str | None = None
    """Dtype of the residual stream under autocast. Default: the dtype of the weights."""
    average: bool = False
    """True if an exponential moving average of the weights (EMA) is kept."""
    accumulate: int = 1
    """Number of micro-batches per step whose gradients are accumulated."""
    fused: bool = False
    """True for a fused AdamW, which needs no temporaries."""
    head_bytes: int | None = None
    """Maximum bytes of the float32 logits of one chunk if head and loss are computed in chunks. Default: no chunks,
    `F.cross_entropy` on all logits."""
    chunk_copies: float = 0.0
    """Peak bytes per logit of a chunk."""
    smoothing: bool = False
    """True for label smoothing, which computes log-softmax a second time. Chunks need nothing more for it."""
    z_loss: bool = False
    """True for the z-loss, whose logsumexp saves the logits and adds a gradient to theirs. Chunks need nothing more."""
    evaluation: int | None = None
    """Sequences per evaluation batch. Default: no evaluation."""
    recompute: Recompute = "no"
    """What is computed again in the backward pass instead of being saved."""
    frozen: tuple[str, ...] = ()
    """Names of parameters that are not trained. With adapters nothing but these is trained."""
    adapted: tuple[str, ...] = ()
    """Names of linear layers with a low-rank adapter."""
    rank: int = 0
    """Rank of the adapters."""
    dora: bool = False
    """True if the adapters also have a magnitude for each row (DoRA)."""
    quantized: bool = False
    """True if the matrices of adapted layers are in NF4."""
    keeps_rounded: bool = False
    """True if frozen matrices are cast once, and the copies are kept from step to step."""
    first_trained: tuple[tuple[str, int], ...] = ()
    """For each stack in which the first blocks are frozen together with all that comes before them: the index of its
    first trained block. Nothing is saved for the blocks before it."""

    def keeps(self, name: str) -> bool:
        """Return whether the cast copy of a matrix is kept from step to step."""
        if not self.keeps_rounded or (self.quantized and name.removesuffix(".weight") in self.adapted):
            return False
        return bool(self.adapted) or name in self.frozen

    def without_gradient(self, stack: str) -> int:
        """Return the number of first blocks of a stack through which no gradient flows."""
        return dict(self.first_trained).get(stack, 0)


NF4_BYTES = 0.5 + 4 / 64
"""Bytes of a weight in NF4: 4 bits, and a float32 for each block of 64."""
NF4_TEMPORARIES = 14
"""Bytes per weight of a matrix while it is dequantized: unpacked codes, indices, levels and the result."""


def trained_shapes(shapes: Mapping[str, tuple[int, ...]], options: StepOptions) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters that are trained, of all parameters of a config."""
    if not options.adapted:
        return {name: shape for name, shape in shapes.items() if name not in options.frozen}
    trained: dict[str, tuple[int, ...]] = {}
    for name in options.adapted:
        rows, columns = shapes[f"{name}.weight"]
        trained |= {f"{name}.lora_A": (options.rank, columns), f"{name}.lora_B": (rows, options.rank)}
        if options.dora:
            trained[f"{name}.lora_magnitude"] = (rows,)
    return trained


def weights_and_adapters(shapes: Mapping[str, tuple[int, ...]], width: int, options: StepOptions) -> int:
    """Return the bytes of all parameters, with adapters and quantized matrices."""
    narrow = {f"{name}.weight" for name in options.adapted} if options.quantized else set()
    total = sum(math.prod(shape) * (NF4_BYTES if name in narrow else width) for name, shape in shapes.items())
    if options.adapted:
        total += width * sum(map(math.prod, trained_shapes(shapes, options).values()))
    return math.ceil(total)


def head_matrix(config: ModelConfig) -> str:
    """Return the name of the parameter that the logits are computed with."""
    return "embed.tokens.weight" if config.head is not None and config.head.tied else "head.weight"


def cast_weights(
    config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], width: int, options: StepOptions
) -> tuple[dict[str, int], int]:
    """Return the bytes of each weight that autocast casts in a step, and of all copies kept from step to step.

    Autocast casts the matrices of the blocks. Among those that are kept is the matrix of a head in chunks.
    """
    sizes = {name: math.prod(shape) * width for name, shape in shapes.items() if len(shape) == 2}
    cast = {name: n for name, n in sizes.items() if ".blocks." in name}
    kept = {name: n for name, n in cast.items() if options.keeps(name)}
    if config.head is not None and options.head_bytes is not None and options.keeps(head_matrix(config)):
        kept[head_matrix(config)] = sizes[head_matrix(config)]
    return {name: n for name, n in cast.items() if name not in kept}, sum(kept.values())


def check_optimizer(optimizer: str) -> Optimizer:
    """Return the name if it is known; raise ValueError otherwise."""
    for known in get_args(Optimizer):
        if optimizer == known:
            return known
    raise ValueError(f"optimizer={optimizer!r} is not known. Use one of {', '.join(get_args(Optimizer))}.")


def states(name: str, optimizer: Optimizer) -> int:
    """Return how many numbers the optimizer stores per number of a parameter, without step counters."""
    match optimizer:
        case "adamw":
            return 2  # two moments
        case "muon":
            return 1 if rule_for(name).matrix else 2  # momentum for matrices, AdamW's two moments for the others
        case "sgd" | "none":
            return 0
        case _:
            assert_never(optimizer)


def state_bytes(sizes: Mapping[str, int], optimizer: Optimizer) -> int:
    """Return the bytes of all optimizer states. `sizes` gives the bytes of each parameter by name."""
    return sum(states(name, optimizer) * size for name, size in sizes.items())


def temporaries(shapes: Mapping[str, tuple[int, ...]], width: int, optimizer: Optimizer, fused: bool) -> int:
    """Return the bytes of temporaries in the optimizer step. `width` is the number of bytes per weight."""
    match optimizer:
        case "adamw":
            # sqrt of the second moment, and the quotient of the moments, for one parameter at a time
            return 0 if fused else 2 * width * max(map(math.prod, shapes.values()))
        case "muon":
            return _muon_temporaries(shapes, width)
        case "sgd" | "none":
            return 0
        case _:
            assert_never(optimizer)


def _muon_temporaries(shapes: Mapping[str, tuple[int, ...]], width: int) -> int:
    """Return the peak of temporaries in the `step` of Muon without its GPU kernels.

    First, the matrices of each shape are stacked: gradients, momenta and their bfloat16 combination (the Nesterov
    momentum), while the combinations of earlier shapes are still alive. Then matrices of one shape and of its transpose
    are orthogonalized together in bfloat16, and the update of one shape is upcast and scaled.
    """
    stacks: dict[tuple[int, ...], int] = {}
    for name, shape in shapes.items():
        if rule_for(name).matrix:
            stacks[shape] = stacks.get(shape, 0) + math.prod(shape)
    combined, peak = 0, 0
    for numbers in stacks.values():
        peak = max(peak, combined + (2 * width + 2) * numbers)
        combined += 2 * numbers
    sides: dict[tuple[int, ...], int] = {}
    for shape, numbers in stacks.items():
        side = tuple(sorted(shape))
        sides[side] = sides.get(side, 0) + numbers
    orthogonalized = 0
    for (rows, columns), numbers in sides.items():
        gram = 2 * numbers // columns * rows  # x x^T of each matrix, and its polynomial
        peak = max(peak, combined + orthogonalized + 2 * 2 * numbers + 2 * gram)
        orthogonalized += 2 * numbers
    update = max((2 * width * numbers for numbers in stacks.values()), default=0)
    return max(peak, combined + orthogonalized + update)
