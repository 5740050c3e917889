"""A decoder-only model whose cached step is one call of a compiled kernel."""

import ctypes
import weakref
from typing import Any, cast

import torch
from torch import Tensor

from glassformer import config as c
from glassformer.kernels.cpu.decode import library
from glassformer.kernels.cpu.decode.pack import (
    KINDS,
    Precision,
    Store,
    address,
    borrow,
    collapse,
    linear,
    matrix,
    norm,
    room,
)
from glassformer.kernels.registry import POSITION_FIELDS, Rule, any_value, unsupported_field
from glassformer.model import DecoderLM
from glassformer.model.block import ParallelBlock, SequentialBlock
from glassformer.model.positions import Learned, Rotary, Sinusoidal, alibi_slopes, sinusoids
from glassformer.shapes import Float, Int

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "relu2", "tanh")
PLACEMENTS = ("pre", "post", "parallel")
CHUNK = 1024
"""Tokens of prompts that are read at once: all their hidden activations are in memory."""
_NONE, _TABLE, _HALVES, _PAIRS, _ALIBI = range(5)


ALLOWED: dict[str, Rule] = {
    **dict.fromkeys(("vocab_size", "d_model", "n_layers", "max_len", "dropout", "init_std"), any_value),
    "attention": {"Attention"},
    **dict.fromkeys((f"attention.{name}" for name in ("n_heads", "n_kv_heads", "d_head", "d_value")), any_value),
    **dict.fromkeys((f"attention.{name}" for name in ("scale", "bias", "out_bias")), any_value),
    **dict.fromkeys((f"attention.{name}" for name in ("window", "window_layers")), any_value),
    "attention.qk_norm": {None, "layer_norm", "rms_norm"},
    **dict.fromkeys(("attention.qk_norm.eps", "attention.qk_norm.bias"), any_value),
    "feedforward": {"dense", "gated", "none"},
    "feedforward.activation": ACTIVATIONS,
    **dict.fromkeys(("feedforward.d_ff", "feedforward.bias"), any_value),
    "norm": {"layer_norm", "rms_norm"},
    **dict.fromkeys(("norm.eps", "norm.bias"), any_value),
    "position": {"none", "learned", "sinusoidal", "rotary", "alibi"},
    **POSITION_FIELDS,
    "placement": PLACEMENTS,
    "embedding": {"Embedding"},
    **dict.fromkeys(("embedding.scale", "embedding.norm"), any_value),
    "head": {"Head"},
    **dict.fromkeys(("head.tied", "head.bias", "head.scale"), any_value),
    "special": {"Special"},
    **dict.fromkeys((f"special.{name}" for name in ("bos", "eos", "pad", "start")), any_value),
}
"""The config fields that the kernels implement."""


def unsupported_config(config: c.ModelConfig) -> str | None:
    """Return why the kernels cannot run a model of this config, or None if they can."""
    if not isinstance(config, c.DecoderConfig):
        return "only decoder-only models have compiled kernels"
    return unsupported_field(config, ALLOWED)


class Weights:
    """A model as the kernels read it: structures with pointers to its parameters, or to a packed copy of them."""

    def __init__(self, model: DecoderLM, precision: Precision):
        cfg, feed = model.config, model.config.feedforward
        assert model.head is not None
        self.precision: Precision = precision
        self.store = Store(room([p for p in model.parameters() if p.dim() == 2], precision))
        activation = "relu" if isinstance(feed, c.NoFeedForward | c.MoE) else feed.activation
        self.model = library.Model(
            layers=cfg.n_layers, d_model=cfg.d_model, heads=cfg.n_heads, kv_heads=cfg.n_kv_heads, d_head=cfg.d_head,
            d_value=cfg.d_value, d_ff=cfg.d_ff, vocabulary=cfg.vocab_size, placement=PLACEMENTS.index(cfg.placement),
            activation=ACTIVATIONS.index(activation), gated=isinstance(feed, c.Gated),
            scale=cfg.scale, embed_scale=cfg.embedding.scale, head_scale=model.head.scale,
            tokens=self.store.refer(model.embed.tokens.weight),
            embedded=norm(self.store, model.decoder.embed_norm), last=norm(self.store, model.decoder.norm),
        )  # fmt: skip
        layers = [self._layer(block, cfg.window(i)) for i, block in enumerate(model.blocks)]
        self.layers = (library.Layer * cfg.n_layers)(*layers)
        self.model.layer = ctypes.cast(self.layers, ctypes.POINTER(library.Layer))
        table = model.embed.tokens.weight if model.head.weight is None else model.head.weight
        self.model.head = matrix(self.store, table, model.head.bias, precision)

    def _layer(self, block: Any, window: int | None) -> library.Layer:
        store, attention, precision = self.store, block.attention, self.precision
        made = library.Layer(
            window=window or 0,
            attention=norm(store, block.norm if isinstance(block, ParallelBlock) else block.norm_attention),
            q=norm(store, attention.q_norm),
            k=norm(store, attention.k_norm),
            q_of=linear(store, attention.q, precision),
            k_of=linear(store, attention.k, precision),
            v_of=linear(store, attention.v, precision),
            out=linear(store, attention.o, precision),
        )
        feed: Any = block.feedforward
        if feed is not None:
            if isinstance(block, SequentialBlock):
                made.feedforward = norm(store, block.norm_feedforward)
            made.up, made.down = linear(store, feed.up, precision), linear(store, feed.down, precision)
            if hasattr(feed, "gate"):
                made.gate = linear(store, feed.gate, precision)
        return made


_PACKED: "weakref.WeakKeyDictionary[DecoderLM, dict[str, tuple[Any, Weights]]]" = weakref.WeakKeyDictionary()


LONG = 200
"""Tokens after which the weights of a model are moved to huge pages. For GPT-2 small this costs 1.2 s and saves 3 ms
per token: a model that has decoded 200 tokens will probably decode 400 more."""
_EXPECTED: "weakref.WeakKeyDictionary[DecoderLM, int]" = weakref.WeakKeyDictionary()


def settle(model: DecoderLM, tokens: int) -> bool:
    """Move the weights of a model to huge pages once it has been used for long enough; return whether that was now.

    Reading half a gigabyte per token through ordinary pages loses a fifth of the memory bandwidth to TLB misses.
    """
    before = _EXPECTED.get(model, 0)
    _EXPECTED[model] = before + tokens
    if before >= LONG or before + tokens < LONG:
        return False
    for first, last in stretches([(p.data_ptr(), p.data_ptr() + p.nbytes) for p in model.parameters()]):
        collapse(first, last)
    return True


def stretches(pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join address ranges that are less than a megabyte apart.

    A matrix of two megabytes seldom contains a whole huge page, but together with its neighbours it does.
    """
    joined: list[tuple[int, int]] = []
    for first, last in sorted(pieces):
        if joined and first - joined[-1][1] < 1 << 20:
            joined[-1] = joined[-1][0], max(joined[-1][1], last)
        else:
            joined.append((first, last))
    return joined


def reads_in_place(model: DecoderLM, precision: Precision) -> bool:
    """Return whether the kernels read the parameters themselves, and not a converted copy."""
    return precision == "float32" and all(p.dtype is torch.float32 for p in model.parameters())


def weights_of(model: DecoderLM, precision: Precision) -> Weights:
    """Return the weights for the kernels: converted once per model and precision, and again when a weight changes.

    float16 and bfloat16 weights become float32, which is exact.
    """
    if reads_in_place(model, precision):
        return Weights(model, precision)  # only addresses
    held = _PACKED.setdefault(model, {})
    present = fingerprint(model)
    if precision not in held or held[precision][0] != present:
        held[precision] = (present, Weights(model, precision))
    return held[precision][1]


def fingerprint(model: DecoderLM) -> tuple[int, ...]:
    """Return addresses, sizes and a checksum of all weights, which changes with any change of a weight (checksum.h).

    All weights are read for it, at memory bandwidth: writes through `.data` can be detected in no other way.
    """
    held = [parameter.detach().contiguous() for parameter in model.parameters()]
    ranges = (library.MemoryRange * len(held))(*[library.MemoryRange(p.data_ptr(), p.nbytes) for p in held])
    checksum = library.load().glass_checksum(ranges, len(ranges), torch.get_num_threads())
    return (checksum, *(number for p in model.parameters() for number in (p.data_ptr(), p.nbytes)))


class NativeDecoder:
    """A cache of `rows` sequences of at most `capacity` tokens, and the step that extends it."""

    owns_threads = True
    """Torch should compute in one thread between the steps: the kernels have threads of their own."""

    def __init__(
        self,
        model: DecoderLM,
        rows: int = 1,
        capacity: int | None = None,
        precision: str = "float32",
        threads: int | None = None,
    ):
        cfg = model.config
        reason = unsupported_config(cfg)
        if reason is not None:
            raise library.NativeError(f"{reason}: use engine='torch'.")
        if precision not in KINDS:
            raise library.NativeError(f"precision={precision!r} is not known: use {', '.join(KINDS)}.")
        if model.device.type != "cpu":
            raise library.NativeError(f"the kernels run on a CPU and the model is on {model.device}: move it.")
        self.library, self.config, self.rows = library.load(), cfg, rows
        self.threads = threads or max(1, torch.get_num_threads())
        self.capacity = capacity or cfg.max_len or 1024
        if cfg.learned_positions is not None and cfg.max_len is not None:
            self.capacity = min(self.capacity, cfg.max_len)
        known = cast("Precision", precision)
        self.weights = weights_of(model, known)
        if reads_in_place(model, known):
            settle(model, self.capacity)
        self.model = library.Model.from_buffer_copy(self.weights.model)
        self.tables = Store(0)
        self._set_positions(model.decoder.position)
        self.keys = borrow(self, cfg.n_layers, rows, cfg.n_kv_heads, self.capacity, cfg.d_head)
        self.values = borrow(self, cfg.n_layers, rows, cfg.n_kv_heads, self.capacity, cfg.d_value)
        self.lengths = torch.zeros(rows, dtype=torch.int32)

    def step(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        """Return the logits after one more token per sequence."""
        # one foreign call and little else: at hundreds of tokens per second, every torch operation counts
        if tokens.shape != (self.rows,):
            raise library.NativeError(f"tokens of shape {tuple(tokens.shape)}: give one for each of {self.rows} rows.")
        given = tokens.to("cpu", torch.int64).contiguous()
        logits = torch.empty(self.rows, self.config.vocab_size)
        full = self.library.glass_next(
            self.model, self._cache(), given.data_ptr(), self.lengths.data_ptr(), self.threads, logits.data_ptr()
        )
        if full:
            raise library.NativeError(self._full())
        return logits

    def _cache(self) -> library.Cache:
        return library.Cache(self.keys.data_ptr(), self.values.data_ptr(), self.rows, self.capacity)

    def _full(self) -> str:
        return f"the cache holds {self.capacity} tokens and is full: make it larger."

    def read(self, prompts: list[list[int]], chunk: int | None = None) -> Float[Tensor, "B V"]:
        """Return the logits after one prompt per sequence, without padding. `chunk`: most tokens read at once.

        From 16 tokens on, activations are rounded too, because multiplications are then the bottleneck: to bfloat16 if
        the weights are bfloat16, to 8 bits with a scale per token and group of columns if they are int8 or int4.
        KL divergence of the next token from float32 after 96 tokens of a GPT-2 small with seeded weights: 1.9e-5 nats
        in bfloat16 and 3.8e-4 in int8 (token by token, with activations in float32 or 16 bits: 1.0e-5 and 1.6e-4; int8
        of onnxruntime, with one scale per tensor: 5.8e-4).
        """
        rows, last = [], []
        for row, prompt in enumerate(prompts):
            start = int(self.lengths[row])
            rows += [(token, row, start + i) for i, token in enumerate(prompt)]
            last.append(len(rows) - 1)
        entries, ends = torch.tensor(rows, dtype=torch.int32), torch.tensor(last, dtype=torch.int32)
        size = chunk or CHUNK
        logits = torch.empty(len(prompts), self.config.vocab_size)
        for first in range(0, len(entries), size):
            here = (ends >= first) & (ends < first + size)
            logits[here] = self._run(entries[first : first + size], ends[here] - first)
        return logits

    def extend(
        self, sequence: int, keep: int, tokens: list[int], wanted: int, chunk: int | None = None
    ) -> Float[Tensor, "T V"]:
        """Crop a sequence to its first `keep` tokens, read more, and return the logits after the last `wanted`."""
        self.lengths[sequence] = keep
        entries = [(token, sequence, position) for position, token in enumerate(tokens, keep)]
        size, first_wanted, logits = max(chunk or CHUNK, wanted), len(entries) - wanted, []
        for first in range(0, len(entries), size):
            part = torch.tensor(entries[first : first + size], dtype=torch.int32)
            begin = min(max(first_wanted - first, 0), len(part) - 1)  # the kernels return at least one token's logits
            logits.append(self._run(part, torch.arange(begin, len(part), dtype=torch.int32)))
        return logits[0] if len(logits) == 1 else torch.cat(logits)[-wanted:]

    def _run(self, entries: Int[Tensor, "N 3"], wanted: Int[Tensor, "M"]) -> Float[Tensor, "M V"]:
        """Read entries (token, sequence, position) and return the logits of those `wanted`."""
        if int(entries[:, 2].max()) >= self.capacity:
            raise library.NativeError(self._full())
        entries, wanted = entries.contiguous(), wanted.contiguous()
        logits = torch.empty(len(wanted), self.config.vocab_size)
        given = (ctypes.byref(self.model), ctypes.byref(self._cache()), address(entries), len(entries), address(wanted))
        self.library.glass_step(*given, len(wanted), self.threads, address(logits))
        self.lengths.index_put_((entries[:, 1].long(),), torch.ones_like(entries[:, 1]), accumulate=True)
        return logits

    def reorder(self, parents: Int[Tensor, "N"]) -> None:
        """Let sequence i continue the present sequence parents[i]."""
        self.keys, self.values = self.keys.index_select(1, parents), self.values.index_select(1, parents)
        self.lengths = self.lengths.index_select(0, parents)
        self.rows = len(parents)

    def _set_positions(self, scheme: Any) -> None:
        """Set the position tables, as long as the cache."""
        positions, keep = torch.arange(self.capacity), self.tables.refer
        match scheme:
            case Learned():
                self.model.position, self.model.position_table = _TABLE, keep(scheme.weight[scheme.offset :])
            case Sinusoidal():
                waves = sinusoids(positions, self.config.d_model, scheme.spec)
                self.model.position, self.model.position_table = _TABLE, keep(waves)
            case Rotary():
                self.model.position = _HALVES if scheme.spec.pairing == "halves" else _PAIRS
                self.model.rotated = scheme.d_rotated
                self.model.cosines, self.model.sines = map(keep, scheme.table(positions, torch.float32))
            case _ if isinstance(self.config.position, c.Alibi):
                self.model.position = _ALIBI
                self.model.slopes = keep(torch.tensor(alibi_slopes(self.config.n_heads)))
            case _:
                self.model.position = _NONE
