"""Training on many devices, on paper: time of a step, memory, cost, for data, sharded and tensor parallelism.

Let n devices share the work, P parameters, b sequences of T tokens per device. One device's compute is that of
`devices`; what many add is communication, as rings inside a machine and between machines:

    data      gradients (4 bytes) all-reduced once a step in buckets; hides under the backward pass (2/3 of the compute)
    sharded   weights (4 bytes, as `glass train` sends them) gathered for the forward and again for the backward pass,
              gradients (4 bytes) reduce-scattered, a message per layer and one for the rest; hides under the whole pass
              (ZeRO-3, torch's fully_shard). What nothing hides: each message is copied into one buffer before and out
              of it after, 2·(1 + 1/n) bytes through memory for each byte of it
    tensor t  t devices of one machine share every layer: 4 all-reduces of the stream (2 bytes) per layer and step that
              nothing hides; the n/t groups are sharded as above, each device holding 1/t of the layers' weights

An all-reduce of s bytes over n devices moves 2·s·(n-1)/n through each link, a gather or a scatter half of that, each at
the rate that was measured for it (rings do all alike; gloo takes twice as long to scatter as to gather). Across m
machines the devices of one first reduce among themselves, then each does its share with its peers in the others. How
much hides is a property of the device, `overlap`: nothing where the link is the processor's own memory, since what
copies there is what computes, and torch's fully_shard waits for each message.

Memory per device: 16 bytes per parameter (float32 weight, gradient and two moments), divided among those that shard it,
plus two gathered layers, plus what autograd saves in bfloat16 (`activations`; the logits never exist whole), divided by
t. Where that does not fit, blocks are recomputed in the backward pass: only their inputs are kept, and compute is 4/3.
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from glassformer.config import DecoderConfig, Gated, ModelConfig, MoE, NoFeedForward
from glassformer.sizing.activations import Pass, saved_by_block, saved_by_entry, saved_by_exit
from glassformer.sizing.devices import Device
from glassformer.sizing.flops import flops, lengths
from glassformer.sizing.parameters import active, count, parameters

STATE = 16
_STREAM, _HIDDEN, _LOGIT = 42.0, 13.4, 7.5
"""Bytes of pointwise work; see `devices`."""
STEP = 50.0
"""Bytes through memory for each parameter that the optimizer updates."""
RECOMPUTED = 4 / 3
BUCKET = 25 * 2**20
"""Bytes of gradients that data parallelism sends in one message (torch's default)."""


@dataclass(frozen=True)
class Plan:
    """One way to train one model on some devices."""

    strategy: str
    """`data`, `sharded` or `tensor t`."""
    gpus: int
    batch: int
    """Sequences of a step, all devices together."""
    tokens: int
    """Tokens of a step, all devices together."""
    compute: float
    """Seconds of one step's work on each device."""
    communication: float
    """Seconds of communication, hidden or not."""
    exposed: float
    """Seconds of it that nothing hides."""
    memory: float
    """Bytes on each device."""
    recompute: bool
    fits: bool
    flops: float
    """Of a step, by the products that are needed; recomputation is not counted."""
    device: Device

    @property
    def step(self) -> float:
        return self.compute + self.exposed

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step

    @property
    def utilisation(self) -> float:
        """Needed FLOP/s as a share of the promised peak."""
        return self.flops / self.step / self.gpus / self.device.peak

    def hours(self, tokens: float) -> float:
        return tokens / self.tokens_per_second / 3600

    def cost(self, tokens: float) -> float | None:
        """US dollars; None where no price is given."""
        return None if self.device.price is None else self.hours(tokens) * self.gpus * self.device.price

    def to_dict(self) -> dict[str, Any]:
        derived = {
            "step": self.step, "tokens_per_second": self.tokens_per_second, "utilisation": self.utilisation,
        }  # fmt: skip
        return {**asdict(self), "device": self.device.name, **derived}


def all_reduce(size: float, n: int, device: Device, messages: int = 1) -> float:
    """Seconds to sum `size` bytes over n devices, each ending with the sum."""
    return 2 * _ring(size, n, device.link, device, messages)


def gather(size: float, n: int, device: Device, messages: int = 1) -> float:
    """Seconds until each of n devices, holding 1/n of `size` bytes, holds all of it."""
    return _ring(size, n, device.gather, device, messages)


def scatter(size: float, n: int, device: Device, messages: int = 1) -> float:
    """Seconds until each of n devices, holding `size` bytes, holds 1/n of their sum: a reduce-scatter."""
    return _ring(size, n, device.scatter, device, messages)


def _ring(size: float, n: int, rate: float, device: Device, messages: int) -> float:
    """One way round: each device passes on (n-1)/n of `size`, at `rate` inside a machine."""
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
    """Seconds to put together what is gathered or scattered, `size` bytes over n devices, and to take it apart."""
    return 0.0 if n == 1 else 2 * (1 + 1 / n) * size / device.memory


@dataclass(frozen=True)
class Work:
    """Of one sequence, forward and backward: FLOPs of products and of attention, bytes of what is pointwise."""

    products: float
    attention: float
    moved: float

    def seconds(self, device: Device) -> float:
        return self.products / device.products + self.attention / device.attention + self.moved / device.memory


def work(config: ModelConfig, context: int) -> Work:
    """What `devices` divides by rates; a step of b sequences is b times that, the optimizer and the gaps."""
    whole = flops(config, 1, context)
    products = 3 * sum(n for part, n in whole.needed.items() if part not in ("scores", "mix", "cross_scores"))
    attention = 3.5 * sum(whole.needed.get(part, 0) for part in ("scores", "mix", "cross_scores"))
    ff = config.feedforward
    expert = ff.expert if isinstance(ff, MoE) else ff
    hidden = 0.0
    if not isinstance(ff, NoFeedForward) and not isinstance(expert, NoFeedForward):
        hidden = config.d_ff * (1.5 if isinstance(expert, Gated) else 1.0) * (ff.n_active if isinstance(ff, MoE) else 1)
    moved = context * (config.n_layers * (_STREAM * config.d_model + _HIDDEN * hidden) + _LOGIT * config.vocab_size)
    return Work(products, attention, moved)


def saved_bytes(config: ModelConfig, batch: float, context: int, recompute: bool) -> float:
    """What autograd keeps in bfloat16 for `batch` sequences, logits excepted."""
    run = Pass(config, 1, context, 2, causal=True, training=True)
    ends = saved_by_entry(run) + saved_by_exit(run)
    blocks = [saved_by_block(run, layer) for layer in range(config.n_layers)]
    kept = config.n_layers * run.stream + max(blocks) if recompute else sum(blocks)
    return batch * (ends + kept)


def plan(
    config: ModelConfig,
    gpus: int,
    device: Device,
    strategy: str = "sharded",
    batch: int = 8,
    context: int | None = None,
    weight_bytes: int = 4,
) -> Plan:
    """Predict a step of `batch` sequences per device. `strategy`: data, sharded, or tensor 2, 4, 8.

    `weight_bytes`: in which gathered weights travel, 4 for float32 (as `glass train` sends them), 2 for bfloat16.
    """
    if not isinstance(config, DecoderConfig):
        raise ValueError("only decoder-only models are planned: their step is the one that was measured.")
    for name, value in (("gpus", gpus), ("batch", batch)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")
    T, _ = lengths(config, context, None)
    shared = _shared(strategy, gpus, device)
    P = count(config)
    layer = sum(math.prod(shape) for name, shape in parameters(config).items() if ".blocks.0." in name)
    groups = gpus // shared
    together = batch * shared  # a group works on its devices' sequences at once
    state = P * STATE / (gpus if strategy != "data" else 1)
    gathered = 2 * layer / shared * weight_bytes if strategy != "data" and groups > 1 else 0.0
    fits, recompute, memory = False, False, 0.0
    for recompute in (False, True):
        memory = state + gathered + saved_bytes(config, together, T, recompute) / shared
        fits = memory <= device.capacity
        if fits:
            break
    times = RECOMPUTED if recompute else 1.0
    compute = together * work(config, T).seconds(device) / shared * times + device.gaps
    optimizer = P * STEP / device.memory / (gpus if strategy != "data" else 1)
    if strategy == "data":
        communication = all_reduce(4 * P, gpus, device, math.ceil(4 * P / BUCKET))
        exposed = max(0.0, communication - device.overlap * compute * 2 / 3)
    else:
        hidden = _sharded(P / shared, weight_bytes, groups, config.n_layers + 1, _among(shared, device))
        stream = 2 * together * T * config.d_model
        seen = 4 * config.n_layers * all_reduce(stream, shared, device) * times
        seen += copies((2 * weight_bytes + 4) * P / shared, groups, device)
        communication, exposed = hidden + seen, max(0.0, hidden - device.overlap * compute) + seen
    needed = 3 * sum(flops(config, 1, T).needed.values()) * batch * gpus
    return Plan(
        strategy, gpus, batch * gpus, batch * gpus * T, compute + optimizer, communication, exposed, memory, recompute,
        fits, needed, device,
    )  # fmt: skip


def _sharded(held: float, weight_bytes: int, n: int, messages: int, device: Device) -> float:
    """Seconds in which `held` parameters are gathered twice and their gradients scattered once."""
    return 2 * gather(weight_bytes * held, n, device, messages) + scatter(4 * held, n, device, messages)


def _shared(strategy: str, gpus: int, device: Device) -> int:
    if strategy in ("data", "sharded"):
        return 1
    kind, _, degree = strategy.partition(" ")
    if kind != "tensor" or not degree.isdigit() or int(degree) < 2:
        raise ValueError(f"strategy={strategy!r} is not known: use 'data', 'sharded' or 'tensor 2', 'tensor 4', ….")
    if int(degree) > device.per_machine or gpus % int(degree):
        raise ValueError(
            f"{strategy!r} on {gpus} devices: the degree must divide them and fit a machine of {device.per_machine}."
        )
    return int(degree)


def _among(shared: int, device: Device) -> Device:
    """The same links as one member of each group sees them: its machine holds fewer of its peers."""
    return replace(device, per_machine=max(1, device.per_machine // shared))


def strategies(gpus: int, device: Device) -> list[str]:
    """Every way there is to use this many."""
    degrees = [t for t in (2, 4, 8, 16) if t <= device.per_machine and gpus % t == 0]
    return ["data", "sharded", *(f"tensor {t}" for t in degrees)] if gpus > 1 else ["data"]


def best(config: ModelConfig, gpus: int, device: Device, batch: int = 8, context: int | None = None) -> Plan:
    """The fastest that fits; where none does, the one that needs least memory."""
    plans = [plan(config, gpus, device, strategy, batch, context) for strategy in strategies(gpus, device)]
    fitting = [p for p in plans if p.fits]
    return min(fitting, key=lambda p: p.step) if fitting else min(plans, key=lambda p: p.memory)


def compute_optimal_tokens(config: ModelConfig) -> float:
    """20 tokens for each parameter that a token meets."""
    return 20.0 * active(config)
