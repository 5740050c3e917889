"""Predict training on many devices: step time, memory and cost of every way in which `glass train` shares the work.

n devices train a model of P parameters with b sequences of T tokens per device. `devices` gives the compute time of one
device, `strategy` the ways, `rank_memory` the memory. Communication is added, as rings inside and between machines:

    data         One all-reduce of the gradients (4 bytes each) per step, in buckets. It overlaps with the backward pass
                 (2/3 of the compute).
    sharded      ZeRO-3, torch's fully_shard. The weights (4 bytes, or 2 with machine.gather = "bfloat16") are
                 all-gathered for the forward pass and again for the backward pass; the gradients (4 bytes) are
                 reduce-scattered. There is one message per layer and one for everything else. This overlaps with
                 forward and backward pass. Copying each message into a buffer and out of it does not overlap:
                 2·(1 + 1/n) bytes of memory traffic per byte.
    replicate r  The same among the n/r devices of a copy. Then the shards of the gradient (4 bytes) are all-reduced
                 over the r copies, which overlaps as well.
    tensor t     Per layer and step, 4 all-gathers and 4 reduce-scatters of the residual stream (2 bytes). For embedding
                 and head, 2 all-reduces and 2 all-gathers of it, and 5 messages of some bytes. Nothing overlaps, and
                 each copies what it exchanges. The devices of a group compute the sequences of all of them together.
                 Each device holds 1/t of all matrices, and all of norms and positions (`config.placement`); over the
                 n/t groups they are sharded as above.
    context c    In every layer, keys and values (2 bytes) are all-gathered and their gradients reduce-scattered,
                 without overlap. The devices of a group compute b sequences together, each 1/c of every one, so that a
                 step has fewer sequences.

An all-reduce of s bytes over n devices sends 2·s·(n-1)/n bytes through each link, an all-gather or a reduce-scatter
half of that. Each has its own measured rate (equal with rings; gloo takes twice as long for a reduce-scatter as for an
all-gather). Across machines, the devices of each machine reduce first, then each device exchanges its share with its
peers in the other machines. `Device.overlap` says how much communication overlaps with compute: nothing on a CPU, where
the processor that copies is the one that computes and fully_shard waits for each message.

What does not fit into the memory of the device is tried with weights gathered in bfloat16, then with
`machine.recompute = "full"`, which multiplies compute by 4/3, then with both.
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from glassformer.config import DecoderConfig, ModelConfig
from glassformer.sizing.devices import Device
from glassformer.sizing.flops import flops, lengths
from glassformer.sizing.parameters import active
from glassformer.sizing.rank_memory import held_parameters, hidden_units, rank_bytes
from glassformer.sizing.strategy import Strategy, parse_strategy, strategies, why_impossible

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
    """Such as `data`, `sharded` or `tensor 2 x context 4`."""
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
    weight_bytes: int = 4
    """Bytes in which weights are gathered."""

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
        """The fields of [machine] in a run file that train as planned. `loop.batch` is `batch`."""
        found = parse_strategy(self.strategy).settings
        if found["parallel"] == "fsdp" and self.weight_bytes == 2:
            found |= {"precision": "bfloat16", "gather": "bfloat16"}
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
    hidden = hidden_units(config.feedforward, gated=1.5)  # two inputs and one output instead of one of each
    moved = context * (config.n_layers * (_RESIDUAL * config.d_model + _HIDDEN * hidden) + _LOGIT * config.vocab_size)
    return Work(matmuls, attention, moved / shared)


def plan(
    config: ModelConfig,
    gpus: int,
    device: Device,
    strategy: str | Strategy = "sharded",
    batch: int = 8,
    context: int | None = None,
    weight_bytes: int | None = None,
    width: int = 2,
) -> Plan:
    """Predict a training step with `batch` sequences per device; with context parallelism, per group of devices.

    `strategy` is such as `data`, `sharded` or `tensor 2 x context 4`. `weight_bytes` is the size in which weights are
    all-gathered: 4 for float32, 2 for bfloat16. Default: 4, or 2 if that is needed to fit. `width` is the size of the
    numbers of matmuls, which tensor and context parallelism send.
    """
    if not isinstance(config, DecoderConfig):
        raise ValueError("plans exist only for decoder-only models, because only their training step was measured.")
    for name, value in (("gpus", gpus), ("batch", batch)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")
    T, _ = lengths(config, context, None)
    how = parse_strategy(strategy) if isinstance(strategy, str) else strategy
    if (problem := why_impossible(how, config, gpus, device, T)) is not None:
        raise ValueError(f"{str(how)!r} is not possible: {problem}.")
    # the devices of a group compute all sequences of the group together
    sequences, step_batch = batch * how.tensor, batch * gpus // how.context
    widths = (4, 2) if weight_bytes is None and how.is_sharded else (weight_bytes or 4,)
    for recompute, sent in ((again, size) for again in (False, True) for size in widths):
        memory = rank_bytes(config, gpus, how, sequences, T, recompute, sent)
        if memory <= device.capacity:
            break
    times = RECOMPUTED if recompute else 1.0
    compute = sequences * work(config, T, how.tensor * how.context).seconds(device) * times + device.gaps
    held = held_parameters(config, how.tensor).total
    optimizer = held / how.shards(gpus) * STEP / device.memory
    hidden, blocking = _communication(config, gpus, device, how, sequences * T, sent, times, width)
    reach = compute * (1.0 if how.is_sharded else 2 / 3)  # gradients are summed in the backward pass only
    exposed = max(0.0, hidden - device.overlap * reach) + blocking
    needed = 3 * sum(flops(config, 1, T).needed.values()) * step_batch
    return Plan(
        str(how), gpus, step_batch, step_batch * T, compute + optimizer, hidden + blocking, exposed, memory, recompute,
        memory <= device.capacity, needed, device, sent,
    )  # fmt: skip


def _communication(
    config: ModelConfig, gpus: int, device: Device, how: Strategy, tokens: int, sent: int, times: float, width: int
) -> tuple[float, float]:
    """Return the seconds of communication that overlaps with compute, and of that which does not.

    `tokens` are those of a group of devices that divide blocks or sequences; `sent` is the size of a gathered weight.
    """
    held, layers = held_parameters(config, how.tensor).total, config.n_layers
    if not how.is_sharded:
        return all_reduce(4 * held, gpus, device, math.ceil(4 * held / BUCKET)), 0.0
    shards, peers = how.shards(gpus), _among(how.tensor, device)
    hidden = _sharded(held, sent, shards, layers + 1, peers)
    hidden += all_reduce(4 * held / shards, how.replicate, _among(how.tensor * shards, device), layers + 1)
    blocking = copies((2 * sent + 4) * held, shards, device)
    residual = width * tokens / how.context * config.d_model
    pairs = layers * (6 if times > 1 else 4)  # a gather and a scatter each; a recomputed block repeats its own
    blocking += pairs * _exchange(residual, how.tensor, device) + _ends(residual, how.tensor, device)
    keys = width * tokens * config.n_kv_heads / how.tensor * (config.d_head + config.d_value)
    blocking += layers * _exchange(keys, how.context, peers)
    if times > 1:
        blocking += all_gather(layers * keys, how.context, peers, layers)
    return hidden, blocking


def _exchange(size: float, n: int, device: Device) -> float:
    """Return the seconds of an all-gather of `size` bytes and a reduce-scatter, with a copy of what each exchanges."""
    if n == 1:
        return 0.0
    return all_gather(size, n, device) + reduce_scatter(size, n, device) + 4 * size / device.memory


def _ends(size: float, n: int, device: Device) -> float:
    """Return the seconds of what ranks that divide blocks exchange outside of them, with `size` bytes of the stream.

    The embedding and the gradient of the head are summed. The gradient of the first block's input and the output of
    the last norm are gathered. Small messages: two of the loss, the gradients of norms, and two of the gradient norm.
    """
    if n == 1:
        return 0.0
    sums = 2 * all_reduce(size, n, device) + 5 * all_reduce(0.0, n, device)
    return sums + 2 * all_gather(size, n, device) + 4 * 2 * size / device.memory


def _sharded(held: float, weight_bytes: int, n: int, messages: int, device: Device) -> float:
    """Return the seconds to all-gather `held` parameters twice and to reduce-scatter their gradients once."""
    return 2 * all_gather(weight_bytes * held, n, device, messages) + reduce_scatter(4 * held, n, device, messages)


def _among(shared: int, device: Device) -> Device:
    """Return the device as seen by groups of `shared` neighbours: a machine holds fewer of its peers."""
    return replace(device, per_machine=max(1, device.per_machine // shared))


def best(config: ModelConfig, gpus: int, device: Device, batch: int = 8, context: int | None = None) -> Plan:
    """Return the fastest plan that fits; if none fits, the one that needs the least memory."""
    return fastest(plans(config, gpus, device, batch, context))


def fastest(found: list[Plan]) -> Plan:
    """Return the fastest plan that fits, of those with the most sequences; if none fits, the one with least memory.

    Context parallelism has fewer sequences in a step, so it is chosen where nothing else fits.
    """
    fitting = [p for p in found if p.fits]
    if not fitting:
        return min(found, key=lambda p: p.memory)
    return max(fitting, key=lambda p: (p.batch, p.tokens_per_second))


def plans(config: ModelConfig, gpus: int, device: Device, batch: int = 8, context: int | None = None) -> list[Plan]:
    """Return a plan for each strategy with which `glass train` can train a model on this many devices."""
    T, _ = lengths(config, context, None)
    return [plan(config, gpus, device, how, batch, context) for how in strategies(gpus, device, config, T)]


def compute_optimal_tokens(config: ModelConfig) -> float:
    """Return the compute-optimal number of tokens by the rule of thumb: 20 per active parameter."""
    return 20.0 * active(config)
