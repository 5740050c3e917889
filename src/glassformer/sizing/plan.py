"""Predict training on many devices: step time, memory and cost with data, sharded and tensor parallelism.

n devices train a model of P parameters with b sequences of T tokens per device. `devices` gives the compute time of one
device. Communication is added to it, as rings inside a machine and between machines:

    data      One all-reduce of the gradients (4 bytes each) per step, in buckets. It overlaps with the backward pass
              (2/3 of the compute).
    sharded   ZeRO-3, torch's fully_shard. The weights (4 bytes, as `glass train` sends them) are all-gathered for the
              forward pass and again for the backward pass; the gradients (4 bytes) are reduce-scattered. There is one
              message per layer and one for everything else. This overlaps with forward and backward pass. Copying each
              message into a buffer and out of it does not overlap: 2·(1 + 1/n) bytes of memory traffic per byte.
    tensor t  t devices of one machine divide the heads and hidden units of every layer, the vocabulary, and between
              them the positions. Gathers and scatters of the residual stream (2 bytes) are as many bytes as 4
              all-reduces per layer and step, and 3 for embedding and head, without overlap. Each device holds 1/t of
              all matrices, and all of norms and positions (`config.placement`); over the n/t groups they are sharded
              as above. Every device saves the inputs of attention and feed-forward of all sequences of its group.

An all-reduce of s bytes over n devices sends 2·s·(n-1)/n bytes through each link, an all-gather or a reduce-scatter
half of that. Each has its own measured rate (equal with rings; gloo takes twice as long for a reduce-scatter as for an
all-gather). Across machines, the devices of each machine reduce first, then each device exchanges its share with its
peers in the other machines. `Device.overlap` says how much communication overlaps with compute: nothing on a CPU, where
the processor that copies is the one that computes and fully_shard waits for each message.

Memory per device: 12 bytes per parameter (float32 weight and two AdamW moments), divided by the number of devices that
shard it; two gathered layers; and the larger of 4 bytes per parameter for the gradient, which grows in the backward
pass, and of what shrinks meanwhile: the activations that autograd saves (see `activations`; the residual stream in
float32, the rest in bfloat16; the logits are computed in chunks and not counted) and the bfloat16 copies of all weights
that autocast makes, which autograd keeps as well. With `data`, gradients are always there. Weights that are gathered in
bfloat16 need no copies. If that does not fit, `machine.recompute = "full"` is used: only the inputs of blocks are
saved, the blocks are recomputed in the backward pass, and compute is multiplied by 4/3. `ranks_memory` in
bench/developer compares this with fake and real ranks.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, assert_never

from glassformer.config import DecoderConfig, Dense, FeedForward, Gated, ModelConfig, MoE, NoFeedForward
from glassformer.config.placement import cut_dimension, divided, indivisible, part_not_supported
from glassformer.sizing.activations import (
    Pass,
    saved_after_blocks,
    saved_before_blocks,
    saved_between,
    saved_by_block,
    saved_by_norm,
)
from glassformer.sizing.devices import Device
from glassformer.sizing.flops import flops, lengths
from glassformer.sizing.parameters import active, count, parameters

STATE, GRADIENT, COPY = 12, 4, 2
"""Bytes per parameter: float32 weight and two AdamW moments; its gradient; the copy that autocast makes."""
_RESIDUAL, _HIDDEN, _LOGIT = 42.0, 13.4, 7.5
"""Bytes of pointwise memory traffic per number of residual stream, hidden layer and logits; see `devices`."""
STEP = 50.0
"""Bytes of memory traffic of the optimizer step, per parameter."""
RECOMPUTED = 4 / 3
"""Factor on compute with activation checkpointing: one more forward pass."""
BUCKET = 25 * 2**20
"""Bytes of gradients per message in data parallelism (torch's default)."""


@dataclass(frozen=True)
class Plan:
    """Predicted step of one model on a number of devices with one parallelism strategy."""

    strategy: str
    """`data`, `sharded` or `tensor t`."""
    gpus: int
    batch: int
    """Sequences per step, summed over all devices."""
    tokens: int
    """Tokens per step, summed over all devices."""
    compute: float
    """Seconds of compute per step on each device."""
    communication: float
    """Seconds of communication per step, including overlapped communication."""
    exposed: float
    """Seconds of communication per step that do not overlap with compute."""
    memory: float
    """Bytes on each device."""
    recompute: bool
    """True if activation checkpointing is needed."""
    fits: bool
    """True if `memory` fits into the capacity of the device."""
    flops: float
    """FLOPs per step without masked scores and without recomputation."""
    device: Device

    @property
    def step(self) -> float:
        return self.compute + self.exposed

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step

    @property
    def utilisation(self) -> float:
        """Model FLOPs utilisation (MFU): FLOP/s as a share of the peak of the data sheet."""
        return self.flops / self.step / self.gpus / self.device.peak

    def hours(self, tokens: float) -> float:
        return tokens / self.tokens_per_second / 3600

    def cost(self, tokens: float) -> float | None:
        """Return the cost in US dollars; None if no price is given."""
        return None if self.device.price is None else self.hours(tokens) * self.gpus * self.device.price

    @property
    def settings(self) -> dict[str, str | int]:
        """The fields of [machine] in a run file that train as planned."""
        kind, _, degree = self.strategy.partition(" ")
        found: dict[str, str | int] = {"parallel": "ddp" if kind == "data" else "fsdp"}
        if degree:
            found["tensor"] = int(degree)
        return found | ({"recompute": "full"} if self.recompute else {})

    def to_dict(self) -> dict[str, Any]:
        derived = {
            "settings": self.settings,
            "step": self.step, "tokens_per_second": self.tokens_per_second, "utilisation": self.utilisation,
        }  # fmt: skip
        return {**asdict(self), "device": self.device.name, **derived}


def all_reduce(size: float, n: int, device: Device, messages: int = 1) -> float:
    """Return the seconds of an all-reduce of `size` bytes over n devices."""
    return 2 * _ring(size, n, device.link, device, messages)


def all_gather(size: float, n: int, device: Device, messages: int = 1) -> float:
    """Return the seconds of an all-gather: each of n devices holds 1/n of `size` bytes and receives the rest."""
    return _ring(size, n, device.gather, device, messages)


def reduce_scatter(size: float, n: int, device: Device, messages: int = 1) -> float:
    """Return the seconds of a reduce-scatter: each of n devices holds `size` bytes and receives 1/n of their sum."""
    return _ring(size, n, device.scatter, device, messages)


def _ring(size: float, n: int, rate: float, device: Device, messages: int) -> float:
    """Return the seconds of one ring pass: each device sends (n-1)/n of `size`, at `rate` inside a machine."""
    if n == 1:
        return 0.0
    near = min(n, device.per_machine)
    machines = math.ceil(n / device.per_machine)
    inside = size * (near - 1) / near / rate + messages * device.latency * math.log2(max(near, 2))
    if machines == 1:
        return inside
    between = size / near * (machines - 1) / machines / device.network
    return inside + between + messages * device.latency * math.log2(machines)


def copies(size: float, n: int, device: Device) -> float:
    """Return the seconds to copy `size` bytes into and out of the buffers of an all-gather or reduce-scatter."""
    return 0.0 if n == 1 else 2 * (1 + 1 / n) * size / device.memory


@dataclass(frozen=True)
class Work:
    """Work of one sequence, forward and backward: FLOPs of matmuls and attention, bytes of pointwise memory traffic."""

    matmuls: float
    attention: float
    moved: float

    def seconds(self, device: Device) -> float:
        return self.matmuls / device.matmuls + self.attention / device.attention + self.moved / device.memory


def work(config: ModelConfig, context: int, shared: int = 1) -> Work:
    """Return the work of one sequence. A step of b sequences takes b times that, plus the optimizer and the gaps.

    `shared` devices divide it (tensor parallelism).
    """
    needed = {part: n / shared for part, n in flops(config, 1, context).needed.items()}
    matmuls = 3 * sum(n for part, n in needed.items() if part not in ("scores", "mix", "cross_scores"))
    attention = 3.5 * sum(needed.get(part, 0) for part in ("scores", "mix", "cross_scores"))
    hidden = _hidden(config.feedforward)
    moved = context * (config.n_layers * (_RESIDUAL * config.d_model + _HIDDEN * hidden) + _LOGIT * config.vocab_size)
    return Work(matmuls, attention, moved / shared)


def _hidden(feedforward: FeedForward) -> float:
    """Return the hidden numbers per token that `_HIDDEN` bytes are counted for, over all active experts."""
    match feedforward:
        case MoE(n_active=active_experts, expert=expert):
            return active_experts * _hidden(expert)
        case Gated(d_ff=width):
            return 1.5 * width  # two inputs and one output instead of one of each
        case Dense(d_ff=width):
            return width
        case NoFeedForward():
            return 0.0
        case _:
            assert_never(feedforward)


def saved_bytes(config: ModelConfig, batch: float, context: int, recompute: bool, shared: int = 1) -> float:
    """Return the bytes that autograd saves for `batch` sequences, without the logits and copies of weights.

    `shared` devices divide blocks and, between attention and feed-forward, the positions.
    """
    run = Pass(divided(config, shared), 1, context, 2, causal=True, training=True, residual_width=4)
    elsewhere = 1 - 1 / shared
    ends = float(saved_before_blocks(run) + saved_after_blocks(run))
    if config.placement != "post":
        ends -= elsewhere * saved_by_norm(config.norm, run.tokens, config.d_model, run.norm_width)
    layers = range(config.n_layers)
    blocks = [saved_by_block(run, layer) - elsewhere * saved_between(run, layer) for layer in layers]
    kept = config.n_layers * run.residual / shared + max(blocks) if recompute else sum(blocks)
    return batch * (ends + kept)


def device_bytes(
    config: ModelConfig, gpus: int, strategy: str, batch: float, context: int, recompute: bool, weight_bytes: int = 4
) -> float:
    """Return the bytes on each device. The devices of a tensor-parallel group compute `batch` sequences together."""
    shared = int(strategy.partition(" ")[2] or 1)
    shapes = parameters(config)
    held = _held(shapes, shared)
    layer = _held({name: shape for name, shape in shapes.items() if ".blocks.0." in name}, shared)
    saved = saved_bytes(config, batch, context, recompute, shared)
    if strategy == "data" or weight_bytes > COPY:
        saved += COPY * (layer if recompute else held)
    if strategy == "data":
        return (STATE + GRADIENT) * held + saved
    groups = gpus // shared
    gathered = 2 * layer * weight_bytes if groups > 1 else 0.0
    return STATE * held / groups + gathered + max(saved, GRADIENT * held / groups)


def plan(
    config: ModelConfig,
    gpus: int,
    device: Device,
    strategy: str = "sharded",
    batch: int = 8,
    context: int | None = None,
    weight_bytes: int = 4,
) -> Plan:
    """Predict a training step with `batch` sequences per device.

    `strategy` is `data`, `sharded`, or `tensor 2`, `tensor 4`, ... `weight_bytes` is the size in which weights are
    all-gathered: 4 for float32 (as `glass train` does), 2 for bfloat16.
    """
    if not isinstance(config, DecoderConfig):
        raise ValueError("plans exist only for decoder-only models, because only their training step was measured.")
    for name, value in (("gpus", gpus), ("batch", batch)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")
    T, _ = lengths(config, context, None)
    shared = _shared(strategy, gpus, device)
    if shared > 1 and (problem := _undivided(config, shared)) is not None:
        raise ValueError(f"{strategy!r} is not possible: {problem}.")
    P = count(config)
    held = _held(parameters(config), shared)
    groups = gpus // shared
    group_batch = batch * shared  # the devices of a group compute all sequences of the group together
    own = P if strategy == "data" else held / groups  # parameters that this device updates
    fits, recompute, memory = False, False, 0.0
    for recompute in (False, True):
        memory = device_bytes(config, gpus, strategy, group_batch, T, recompute, weight_bytes)
        fits = memory <= device.capacity
        if fits:
            break
    times = RECOMPUTED if recompute else 1.0
    compute = group_batch * work(config, T, shared).seconds(device) * times + device.gaps
    optimizer = own * STEP / device.memory
    if strategy == "data":
        communication = all_reduce(4 * P, gpus, device, math.ceil(4 * P / BUCKET))
        exposed = max(0.0, communication - device.overlap * compute * 2 / 3)
    else:
        overlapping = _sharded(held, weight_bytes, groups, config.n_layers + 1, _among(shared, device))
        residual_bytes = 2 * group_batch * T * config.d_model
        blocking = (4 * config.n_layers * times + 3) * all_reduce(residual_bytes, shared, device)
        blocking += copies((2 * weight_bytes + 4) * held, groups, device)
        communication = overlapping + blocking
        exposed = max(0.0, overlapping - device.overlap * compute) + blocking
    needed = 3 * sum(flops(config, 1, T).needed.values()) * batch * gpus
    return Plan(
        strategy, gpus, batch * gpus, batch * gpus * T, compute + optimizer, communication, exposed, memory, recompute,
        fits, needed, device,
    )  # fmt: skip


def _held(shapes: Mapping[str, tuple[int, ...]], shared: int) -> float:
    """Return the parameters of one of `shared` devices that divide a model."""
    return sum(math.prod(shape) / (1 if cut_dimension(name) is None else shared) for name, shape in shapes.items())


def _undivided(config: ModelConfig, shared: int) -> str | None:
    """Return why `shared` devices cannot divide a model; None if they can."""
    if (number := indivisible(config, shared)) is not None:
        return f"{shared} does not divide the {number} of the model"
    problem = part_not_supported(config)
    return None if problem is None else f"tensor parallelism does not support {problem}"


def _sharded(held: float, weight_bytes: int, n: int, messages: int, device: Device) -> float:
    """Return the seconds to all-gather `held` parameters twice and to reduce-scatter their gradients once."""
    return 2 * all_gather(weight_bytes * held, n, device, messages) + reduce_scatter(4 * held, n, device, messages)


def _shared(strategy: str, gpus: int, device: Device) -> int:
    if strategy in ("data", "sharded"):
        return 1
    kind, _, degree = strategy.partition(" ")
    if kind != "tensor" or not degree.isdigit() or int(degree) < 2:
        raise ValueError(f"strategy={strategy!r} is not known: use 'data', 'sharded' or 'tensor 2', 'tensor 4', ….")
    if int(degree) > device.per_machine or gpus % int(degree):
        raise ValueError(
            f"{strategy!r} is not possible on {gpus} devices: the degree must divide the number of devices and be at "
            f"most {device.per_machine}, the devices of one machine."
        )
    return int(degree)


def _among(shared: int, device: Device) -> Device:
    """Return the device as seen by the sharding of tensor-parallel groups: a machine holds fewer of its peers."""
    return replace(device, per_machine=max(1, device.per_machine // shared))


def strategies(gpus: int, device: Device, config: ModelConfig) -> list[str]:
    """Return every strategy with which `glass train` can train a model on this many devices."""
    possible = [t for t in (2, 4, 8, 16) if t <= device.per_machine and gpus % t == 0]
    degrees = [t for t in possible if _undivided(config, t) is None]
    return ["data", "sharded", *(f"tensor {t}" for t in degrees)] if gpus > 1 else ["data"]


def best(config: ModelConfig, gpus: int, device: Device, batch: int = 8, context: int | None = None) -> Plan:
    """Return the fastest plan that fits; if none fits, the one that needs the least memory."""
    plans = [plan(config, gpus, device, strategy, batch, context) for strategy in strategies(gpus, device, config)]
    fitting = [p for p in plans if p.fits]
    return min(fitting, key=lambda p: p.step) if fitting else min(plans, key=lambda p: p.memory)


def compute_optimal_tokens(config: ModelConfig) -> float:
    """Return the compute-optimal number of tokens by the rule of thumb: 20 per active parameter."""
    return 20.0 * active(config)
