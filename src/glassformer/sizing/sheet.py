"""Everything about a model's size in one value: parameters, operations, memory, compute-optimal training."""

from dataclasses import asdict, dataclass
from typing import Any

from glassformer.config import EncoderConfig, ModelConfig, to_dict
from glassformer.sizing.chinchilla import Chinchilla, chinchilla
from glassformer.sizing.flops import Flops, beyond, decode_flops, flops
from glassformer.sizing.memory import InferenceMemory, TrainingMemory, check_dtype, inference_memory, training_memory
from glassformer.sizing.parameters import active, count_by_part
from glassformer.sizing.step import StepOptions, check_optimizer


@dataclass(frozen=True)
class Sheet:
    """What a model costs. `text()` is for people, `to_dict()` for programs."""

    config: ModelConfig
    batch: int
    context: int
    """T: tokens of a sequence, of the target in an encoder-decoder."""
    source: int
    """Tokens of the source in an encoder-decoder, else 0."""
    dtype: str
    optimizer: str
    parts: dict[str, int]
    """Parameters by part."""
    active: int
    """Parameters one token meets; fewer than all only with experts."""
    flops: Flops
    decode: dict[str, int]
    """Operations of one decoded token at this context, by part; empty for an encoder."""
    inference: InferenceMemory
    training: TrainingMemory | None
    """None for a dtype that cannot be trained."""
    chinchilla: Chinchilla
    """Tokens and operations that would be compute-optimal for a model of this many active parameters."""
    options: StepOptions = StepOptions()
    """How the training loop differs from the plain step."""
    notes: tuple[str, ...] = ()
    """Which values came from a run file, and what had to be assumed."""

    @property
    def parameters(self) -> int:
        return sum(self.parts.values())

    @property
    def note(self) -> str | None:
        """Why the model cannot run sequences of this length, where it cannot: the numbers are then of a thought."""
        return beyond(self.config, self.context, self.source)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and text, ready for JSON."""
        pass_flops = {
            "forward": self.flops.forward,
            "forward_needed": self.flops.needed,
            "total_forward": self.flops.total_forward,
            "total_backward": self.flops.total_backward,
            "training": self.flops.training,
            "training_needed": self.flops.training_needed,
            "rule_6nd": self.flops.rule,
            "decode_per_token": self.decode,
            "total_decode_per_token": sum(self.decode.values()),
        }
        training = None
        if self.training is not None:
            training = {**asdict(self.training), "transient": self.training.transient, "step": asdict(self.options)}
        return {
            "config": to_dict(self.config),
            "batch": self.batch,
            "context": self.context,
            "source": self.source,
            "note": self.note,
            "notes": list(self.notes),
            "dtype": self.dtype,
            "optimizer": self.optimizer,
            "parameters": {"total": self.parameters, "active": self.active, "parts": self.parts},
            "flops": pass_flops,
            "memory": {"inference": asdict(self.inference), "training": training},
            "chinchilla": self.chinchilla.to_dict(),
        }

    def text(self, width: int | None = None) -> str:
        """The sheet for a person: each formula with its numbers put in, below them where `width` is too small."""
        from glassformer.sizing.text import render  # it draws this class, so it is not imported at the top

        return render(self, width)


def size(
    config: ModelConfig,
    batch: int = 1,
    context: int | None = None,
    dtype: str = "float32",
    optimizer: str = "adamw",
    source: int | None = None,
    options: StepOptions = StepOptions(),
) -> Sheet:
    """The sheet of a model at work on `batch` sequences of `context` tokens (None: its max_len, or 512).

    `dtype` is that of weights, activations and gradients alike; int8 and int4 are of weights only and leave training
    out. `source` is the encoder's length in an encoder-decoder, None for as long as the context. Raises ValueError for
    a value outside its range, with the rule and the remedy.
    """
    if not isinstance(config, ModelConfig):
        raise TypeError(f"sizing.size takes a ModelConfig, not {type(config).__name__}: gf.size takes other types too.")
    for name, value in (("batch", batch), ("context", context), ("source", source)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{name}={value!r} must be a whole number of at least 1.")
    check_optimizer(optimizer)
    trainable = not check_dtype(dtype).startswith("int")
    work = flops(config, batch, context, source)
    T, S = work.context, work.source or None
    n_active = active(config)
    return Sheet(
        config=config,
        batch=batch,
        context=T,
        source=work.source,
        dtype=dtype,
        optimizer=optimizer,
        parts=count_by_part(config),
        active=n_active,
        flops=work,
        decode={} if isinstance(config, EncoderConfig) else decode_flops(config, T, S),
        inference=inference_memory(config, batch, T, dtype, S),
        training=training_memory(config, batch, T, dtype, optimizer, S, options) if trainable else None,
        chinchilla=chinchilla(params=n_active),
        options=options,
    )
