"""The size sheet of a model: parameters, FLOPs, memory, compute-optimal training."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from glassformer.config import EncoderConfig, ModelConfig, to_dict
from glassformer.sizing.chinchilla import Chinchilla, chinchilla
from glassformer.sizing.flops import Flops, decode_flops, flops, too_long
from glassformer.sizing.memory import InferenceMemory, TrainingMemory, check_dtype, inference_memory, training_memory
from glassformer.sizing.parameters import active, count_by_part
from glassformer.sizing.step import StepOptions, check_optimizer


@dataclass(frozen=True)
class Sheet:
    """Parameters, FLOPs, memory and compute-optimal training of a model. Returned by `gf.size`."""

    config: ModelConfig
    batch: int
    context: int
    """T, tokens per sequence (in an encoder-decoder: of the target)."""
    source: int
    """Tokens per source sequence in an encoder-decoder, otherwise 0."""
    dtype: str
    optimizer: str
    parts: dict[str, int]
    """Parameters by part."""
    active: int
    """Parameters that one token uses: fewer than all only with experts."""
    flops: Flops
    decode: dict[str, int]
    """FLOPs of decoding one token at this context, by part; empty for an encoder."""
    inference: InferenceMemory
    training: TrainingMemory | None
    """None for a dtype that cannot be trained."""
    chinchilla: Chinchilla
    """Compute-optimal tokens and FLOPs for a model with this number of active parameters."""
    options: StepOptions = StepOptions()
    """Differences between the training loop and the plain training step of `memory`."""
    notes: tuple[str, ...] = ()
    """Which values came from a run file, and what had to be assumed."""

    @property
    def parameters(self) -> int:
        return sum(self.parts.values())

    @property
    def note(self) -> str | None:
        """One sentence if the model cannot run sequences of this length, so that the numbers are hypothetical."""
        return too_long(self.config, self.context, self.source)

    def to_dict(self) -> dict[str, Any]:
        """Return numbers and strings for JSON."""
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
            training = {
                **asdict(self.training),
                "transient": self.training.transient,
                "step": _listed(asdict(self.options)),
            }
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

    def _repr_html_(self) -> str:
        """Return the display in a notebook: one table with the formulas."""
        from glassformer.sizing.text import display  # imports this module, so it cannot be imported at the top

        return display(self)

    def text(self, width: int | None = None) -> str:
        """Return the sheet as text, with formulas. A formula that does not fit into `width` goes on the next line."""
        from glassformer.sizing.text import render  # imports this module, so it cannot be imported at the top

        return render(self, width)


def _listed(values: dict[str, Any]) -> dict[str, Any]:
    """Return values with lists in place of tuples, as JSON has them."""
    return {name: json.loads(json.dumps(value)) for name, value in values.items()}


def size(
    config: ModelConfig,
    batch: int = 1,
    context: int | None = None,
    dtype: str = "float32",
    optimizer: str = "adamw",
    source: int | None = None,
    options: StepOptions = StepOptions(),
) -> Sheet:
    """Return the size sheet of a model for `batch` sequences of `context` tokens (default: its max_len, or 512).

    `dtype` applies to weights, activations and gradients. int8 and int4 apply to weights only, and the sheet then has
    no training memory. `source` is the length of the encoder input in an encoder-decoder; default: `context`.

    Raises:
        ValueError: a value is out of range.
    """
    if not isinstance(config, ModelConfig):
        raise TypeError(f"sizing.size takes a ModelConfig, not {type(config).__name__}: use gf.size for other types.")
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
