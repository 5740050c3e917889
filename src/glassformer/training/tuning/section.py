"""The section [lora] of a run file. The string under a field is its documentation (see `training.sections`)."""

from dataclasses import dataclass
from typing import Literal

from glassformer.errors import require, require_choice, require_positive

Quantize = Literal["no", "nf4"]


@dataclass(frozen=True)
class Lora:
    """Train low-rank adapters of linear layers and nothing else (LoRA): W x + alpha / rank * B A x. Needs [start].

    Checkpoints then hold the adapters only, and name the model of [start] and the hash of its weights.
    """

    rank: int = 16
    """Rows of A and columns of B."""
    alpha: float | None = None
    """Scale of the adapters: B A is multiplied by alpha / rank. Default: twice the rank."""
    targets: str | tuple[str, ...] = "linear"
    """Layers that get an adapter: `linear` (all linear layers but the output head), or a list of ends of module names,
    such as ["q", "v"] or ["attention.o"]."""
    dropout: float = 0.0
    """Dropout of the input of A, in training only."""
    rs: bool = False
    """Rank-stabilised LoRA: multiply by alpha / sqrt(rank)."""
    dora: bool = False
    """DoRA: also train the norm of each row of the adapted matrix."""
    quantize: Quantize = "no"
    """`nf4` keeps the adapted matrices in 4 bits (QLoRA): blocks of 64 weights with one float32 scale each."""

    def __post_init__(self) -> None:
        require_positive(self, "rank")
        require(self.alpha is None or self.alpha > 0, f"lora.alpha={self.alpha} must be positive.")
        require(0 <= self.dropout < 1, f"lora.dropout={self.dropout} must be in [0, 1).")
        require_choice(self, "quantize", Quantize)
        require(bool(self.targets), "lora.targets is empty: name layers such as ['q', 'v'], or use 'linear'.")
        require(
            not isinstance(self.targets, str) or self.targets == "linear",
            f"lora.targets={self.targets!r} must be 'linear' or a list of module names, such as ['q', 'v'].",
        )
        require(
            not (self.dora and self.dropout),
            "lora.dora with lora.dropout computes something else in every implementation: set lora.dropout=0.",
        )
