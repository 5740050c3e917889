"""A stack of blocks as the kernels read it: which configs they support, its weights, and its position tables."""

import ctypes
import dataclasses
import weakref
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor

from glassformer import config as c
from glassformer.config.model import PARALLEL
from glassformer.kernels import decode_support
from glassformer.kernels.cpu.decode import library
from glassformer.kernels.cpu.decode.pack import KINDS, Precision, Store, collapse, linear, matrix, norm, room
from glassformer.kernels.registry import Rule, any_value, any_values, unsupported_field
from glassformer.model import DecoderLM, EncoderLM, Seq2Seq
from glassformer.model.block import ParallelBlock, Stack
from glassformer.model.latent import LatentAttention
from glassformer.model.layers import ACTIVATIONS as FUNCTIONS
from glassformer.model.layers import Dense, Gated
from glassformer.model.moe import MoE
from glassformer.model.positions import Learned, NoPosition, Rotary, Sinusoidal, sinusoids
from glassformer.shapes import Float

Model = DecoderLM | EncoderLM | Seq2Seq
ACTIVATIONS = (*decode_support.ACTIVATIONS, "quick_gelu")
"""In the order of their numbers in pointwise.h."""
NORMED_PARTS = ("head", "heads", "all")
SCORES, GROUP_SCORES = ("softmax", "sigmoid"), ("sum_of_two", "max")
"""In the order of their numbers in model.h."""


UNIT = "d_ff bias limit up_offset down_bias"
"""Fields of a feed-forward that is not a mixture."""


SHARED: dict[str, Rule] = {
    **decode_support.ALLOWED,
    **any_values("first_norm residual_scale shared_blocks placement norm.weight norm.offset"),
    "layer_kinds": any_value,  # unsupported_config looks at them
    "attention.qk_norm": {None, "layer_norm", "rms_norm"},
    **any_values("attention.qk_norm.eps attention.qk_norm.bias attention.qk_norm.weight attention.qk_norm.offset"),
    **any_values("attention.qk_norm_over attention.qk_norm_after_rotation attention.clip attention.softcap"),
    **any_values("attention.sinks embedding.norm head.softcap"),
    "feedforward": {"dense", "gated", "moe", "none"},
    "feedforward.activation": ACTIVATIONS,
    **any_values(UNIT, "feedforward"),
    **any_values("feedforward.n_experts feedforward.n_active feedforward.normalize feedforward.shared_gate"),
    "feedforward.expert": {"dense", "gated"},
    "feedforward.expert.activation": ACTIVATIONS,
    **any_values(UNIT, "feedforward.expert"),
    "feedforward.shared": {None, "dense", "gated"},
    "feedforward.shared.activation": ACTIVATIONS,
    **any_values(UNIT, "feedforward.shared"),
    "feedforward.router": {"Router"},
    "feedforward.router.score": SCORES,
    "feedforward.router.group_score": GROUP_SCORES,
    **any_values("bias scale correction groups top_groups", "feedforward.router"),
    "position": {"none", "learned", "sinusoidal", "rotary", "alibi", "t5_bias"},
    "position.rounded": {False},
    "score_bias": {None, "t5_bias"},
    **any_values("position.scale position.buckets position.max_distance score_bias.buckets score_bias.max_distance"),
}
"""The config fields that the CPU kernels implement for all models."""
ALLOWED: dict[str, Rule] = {
    **SHARED,
    "position.scaling": {None, "linear", "ntk", "yarn", "llama3", "long"},
    **any_values("position.scaling.short position.scaling.long"),
    "attention.latent": {None, "Latent"},
    **any_values("kv_rank d_shared q_rank norm norm.eps norm.bias norm.weight norm.offset", "attention.latent"),
}
"""Those that they implement for a decoder."""
ALLOWED_IN_SEQ2SEQ: dict[str, Rule] = {**SHARED, **any_values("n_encoder_layers")}
ALLOWED_IN_ENCODERS: dict[str, Rule] = {
    **SHARED,
    **any_values("pooler embedding.n_segments embedding.width embedding.project embedding.project_bias"),
    "head": {None, "Head"},
    **any_values("head.transform head.width head.transform_bias"),
}
"""torch computes the embedding and the head of an encoder."""


def unsupported_config(config: c.ModelConfig) -> str | None:
    """Return why the CPU kernels cannot run a model of this config, or None if they can."""
    allowed = ALLOWED
    if not isinstance(config, c.DecoderConfig):
        allowed = ALLOWED_IN_ENCODERS if isinstance(config, c.EncoderConfig) else ALLOWED_IN_SEQ2SEQ
    positions = [config.position, *(kind.position for kind in config.layer_kinds)]
    scalings = [getattr(position, "scaling", None) for position in positions]
    limits = {scaling.original_max_len for scaling in scalings if isinstance(scaling, c.LongScaling)}
    if len(limits) > (1 if isinstance(config, c.DecoderConfig) else 0):
        return f"rotary frequencies that change at lengths of {sorted(limits)} tokens are not supported by the kernel"
    others = (kind.feedforward for kind in config.layer_kinds if kind.feedforward is not None)
    configs = [config, *(dataclasses.replace(config, feedforward=other, layer_kinds=()) for other in others)]
    return next((reason for one in configs if (reason := unsupported_field(one, allowed)) is not None), None)


def checked(model: Model, precision: str, remedy: str) -> Precision:
    """Return the precision if the kernels can run the model in it; otherwise raise NativeError with the reason."""
    reason = unsupported_config(model.config)
    if reason is not None:
        raise library.NativeError(f"{reason}: {remedy}.")
    if precision not in KINDS:
        raise library.NativeError(f"precision={precision!r} is not known: use {', '.join(KINDS)}.")
    if model.device.type != "cpu":
        raise library.NativeError(f"the kernels run on a CPU and the model is on {model.device}: move it.")
    return cast("Precision", precision)


class Weights:
    """A stack as the kernels read it: structures with pointers to its parameters, or to a packed copy of them."""

    def __init__(self, model: Model, stack: Stack, precision: Precision):
        cfg, head = model.config, model.head
        self.precision: Precision = precision
        self.changes_frequencies_at = cfg.changes_frequencies_at
        matrices: list[Tensor] = [p for p in model.parameters() if p.dim() == 2]
        for block in stack.blocks:
            if isinstance(block.attention, LatentAttention):
                matrices += [one for pair in by_head(block.attention) for one in pair]
        self.store = Store(room(matrices, precision))
        self.held: list[Any] = []
        """Arrays of structures that others point to, kept alive."""
        attention, layers = cfg.attention, stack.layers
        self.model = library.Model(
            layers=len(layers), d_model=cfg.d_model, heads=cfg.n_heads, kv_heads=cfg.n_kv_heads, d_head=cfg.d_head,
            d_value=cfg.d_value, vocabulary=cfg.vocab_size, causal=stack.causal,
            parallel=cfg.placement in PARALLEL, qk_over=NORMED_PARTS.index(attention.qk_norm_over),
            qk_last=attention.qk_norm_after_rotation, scale=cfg.scale, softcap=attention.softcap or 0,
            clip=attention.clip or 0, residual_scale=cfg.residual_scale, embed_scale=cfg.embedding.scale,
            embedded=norm(self.store, stack.embed_norm), last=norm(self.store, stack.norm),
        )  # fmt: skip
        if attention.latent is not None:  # keys [shared ; c] and values c, of all heads
            self.model.kv_heads, self.model.d_value = 1, attention.latent.kv_rank
            self.model.d_head = attention.latent.d_shared + attention.latent.kv_rank
        made = {id(block): self._layer(block) for block in stack.blocks}  # several layers may share one
        self.layers = (library.Layer * len(layers))(*(made[id(block)] for block in layers))
        for layer, window in zip(self.layers, stack.windows, strict=True):
            layer.window = window or 0
        self.model.layer = ctypes.cast(self.layers, ctypes.POINTER(library.Layer))
        if stack.causal and head is not None:
            self.model.tokens = self.store.refer(model.embed.tokens.weight)
            self.model.head_scale, self.model.head_softcap = head.scale, head.softcap or 0
            table = model.embed.tokens.weight if head.weight is None else head.weight
            self.model.head = matrix(self.store, table, head.bias, precision)

    def _layer(self, block: Any) -> library.Layer:
        store, precision, feed, cross = self.store, self.precision, block.feedforward, block.cross
        made = library.Layer(
            attention=self._branch(block, "attention"), cross=self._branch(block, "cross"),
            feedforward=self._branch(block, "feedforward"),
            q=norm(store, block.attention.q_norm), k=norm(store, block.attention.k_norm),
            q_of=linear(store, block.attention.q, precision), out=linear(store, block.attention.o, precision),
            sinks=store.refer(block.attention.sinks),
        )  # fmt: skip
        if isinstance(block.attention, LatentAttention):
            made.k_of = linear(store, block.attention.k_shared, precision)
            made.v_of = linear(store, block.attention.kv_down, precision)
            made.latent = self._latent(block.attention)
        else:
            made.k_of = linear(store, block.attention.k, precision)
            made.v_of = linear(store, block.attention.v, precision)
        if cross is not None:
            made.cross_q, made.cross_sinks = norm(store, cross.q_norm), store.refer(cross.sinks)
            made.cross_q_of, made.cross_out = linear(store, cross.q, precision), linear(store, cross.o, precision)
        if isinstance(feed, MoE):
            made.experts = self._experts(feed)
        elif feed is not None:
            made.feed = self._feedforward(feed)
        return made

    def _latent(self, attention: LatentAttention) -> library.Latent:
        absorb, value = zip(*by_head(attention), strict=True)
        made = library.Latent(
            c_norm=norm(self.store, attention.kv_down_norm), absorb=self._matrices(absorb), value=self._matrices(value),
            rank=attention.kv_down.out_features, d_shared=attention.d_shared,
            d_query=attention.q.out_features // attention.n_heads, d_value=value[0].shape[0],
        )  # fmt: skip
        if attention.q_down is not None:
            made.q_down = linear(self.store, attention.q_down, self.precision)
            made.q_down_norm = norm(self.store, attention.q_down_norm)
        return made

    def _matrices(self, weights: Iterable[Tensor]) -> Any:
        made = [matrix(self.store, weight, None, self.precision) for weight in weights]
        self.held.append((library.Matrix * len(made))(*made))
        return ctypes.cast(self.held[-1], ctypes.POINTER(library.Matrix))

    def _feedforward(self, feed: Dense | Gated) -> library.FeedForward:
        number = next(i for i, name in enumerate(ACTIVATIONS) if FUNCTIONS[name] is feed.activation)
        up, down = linear(self.store, feed.up, self.precision), linear(self.store, feed.down, self.precision)
        if isinstance(feed, Dense):
            return library.FeedForward(up=up, down=down, activation=number)
        gate = linear(self.store, feed.gate, self.precision)
        limits = {"limit": feed.limit or 0, "up_offset": feed.up_offset}
        return library.FeedForward(gate=gate, up=up, down=down, activation=number, **limits)

    def _experts(self, mixture: MoE) -> library.Experts:
        """The router stays in float32: it is small, and a token that takes another expert is a large error."""
        router, gate, store = mixture.router, mixture.shared_gate, self.store
        units: list[Any] = [*mixture.experts, *([] if mixture.shared is None else [mixture.shared])]
        made = library.Experts(
            router=linear(store, router, "float32"), correction=store.refer(router.correction), scale=mixture.scale,
            count=router.out_features, active=mixture.n_active, has_shared=mixture.shared is not None,
            score=SCORES.index(router.spec.score), normalize=mixture.normalize, groups=router.spec.groups,
            top_groups=router.spec.top_groups, group_score=GROUP_SCORES.index(router.spec.group_score),
        )  # fmt: skip
        if gate is not None:
            made.shared_gate = linear(store, gate, "float32")
        self.held.append((library.FeedForward * len(units))(*(self._feedforward(unit) for unit in units)))
        made.expert = ctypes.cast(self.held[-1], ctypes.POINTER(library.FeedForward))
        return made

    def _branch(self, block: Any, name: str) -> library.Branch:
        """Return where the norms of a branch are."""
        own = block.norm if isinstance(block, ParallelBlock) else getattr(block, f"norm_{name}")
        first = norm(self.store, own)
        match block.placement:
            case "post":
                return library.Branch(after=first)
            case "after":
                return library.Branch(out=first)
            case "sandwich":
                return library.Branch(before=first, out=norm(self.store, getattr(block, f"norm_{name}_out")))
            case _:
                return library.Branch(before=first)


def by_head(attention: LatentAttention) -> list[tuple[Float[Tensor, "C N"], Float[Tensor, "U C"]]]:
    """Return, for each head, the matrices for queries of c (from a query's own part) and for values (from c)."""
    own, value = (module.weight.unflatten(0, (attention.n_heads, -1)) for module in (attention.k, attention.v))
    return list(zip(own.transpose(1, 2), value, strict=True))


class Tables:
    """A copy of a stack's structures with the tables of its positions, as long as a capacity in tokens.

    If long sequences have other rotary frequencies, and there is room for such, their tables follow.
    """

    def __init__(self, weights: Weights, stack: Stack, capacity: int):
        self.weights, self.store, self.capacity = weights, Store(0), capacity
        self.model = library.Model.from_buffer_copy(weights.model)
        self.layers = (library.Layer * len(weights.layers)).from_buffer_copy(weights.layers)
        self.model.layer = ctypes.cast(self.layers, ctypes.POINTER(library.Layer))
        positions = torch.arange(capacity)
        match stack.position if stack.causal else None:  # torch adds the positions of an encoder
            case Learned() as table:
                self.model.position_table = self.store.refer(table.weight.detach()[table.offset :])
            case Sinusoidal() as waves:
                self.model.position_table = self.store.refer(sinusoids(positions, self.model.d_model, waves.spec))
        limit = weights.changes_frequencies_at
        kinds = (False,) if limit is None or capacity <= limit else (False, True)
        rotations: dict[int, tuple[int | None, int | None]] = {}
        for i, layer in enumerate(self.layers):
            scheme = stack.scheme(i)
            if isinstance(scheme, Rotary):
                if id(scheme) not in rotations:
                    tables = [scheme.table(positions, torch.float32, is_long) for is_long in kinds]
                    cosines, sines = (torch.cat(parts) for parts in zip(*tables, strict=True))
                    rotations[id(scheme)] = self.store.refer(cosines), self.store.refer(sines)
                layer.cosines, layer.sines = rotations[id(scheme)]
                layer.rotated, layer.pairing = scheme.d_rotated, scheme.spec.pairing == "interleaved"
        self.model.biases, self.model.reach = self.store.refer(biases(stack, capacity)), capacity


def biases(stack: Stack, capacity: int) -> Tensor | None:
    """Return what the positions add to the scores, by head and distance: (H,N) if causal, otherwise (H,2N-1)."""
    queries = torch.tensor([[capacity - 1]])
    keys = torch.arange(capacity if stack.causal else 2 * capacity - 1)[None]
    schemes: list[NoPosition] = [s for s in (stack.position, stack.score_bias) if s is not None and s.has_bias]
    made = [scheme.bias(queries, keys, torch.float32) for scheme in schemes]
    return None if not made else torch.stack([bias for bias in made if bias is not None]).sum(0)[0, :, 0]


_PACKED: "weakref.WeakKeyDictionary[Model, dict[tuple[str, str], tuple[Any, Weights]]]" = weakref.WeakKeyDictionary()


LONG = 200
"""Tokens, decoded one by one, after which the weights of a model are moved to huge pages. For GPT-2 small this costs
1.2 s and saves 3 ms per token: a model that has decoded 200 tokens will probably decode 400 more."""
_EXPECTED: "weakref.WeakKeyDictionary[Model, int]" = weakref.WeakKeyDictionary()


def settle(model: Model, tokens: int) -> bool:
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


def reads_in_place(model: Model, precision: Precision) -> bool:
    """Return whether the kernels read the parameters themselves, and not a converted copy."""
    return precision == "float32" and all(p.dtype is torch.float32 for p in model.parameters())


def weights_of(model: Model, precision: Precision, stack: str = "decoder") -> Weights:
    """Return the weights for the kernels: converted once per model and precision, and again when a weight changes.

    float16 and bfloat16 weights become float32, which is exact.
    """
    if reads_in_place(model, precision) and model.config.attention.latent is None:
        return Weights(model, getattr(model, stack), precision)  # only addresses
    held = _PACKED.setdefault(model, {})
    present, key = fingerprint(model, stack), (stack, precision)
    if key not in held or held[key][0] != present:
        held[key] = (present, Weights(model, getattr(model, stack), precision))
    return held[key][1]


def fingerprint(model: Model, stack: str = "decoder") -> tuple[int, ...]:
    """Return addresses, sizes and a checksum of weights, which changes with any change of one of them (checksum.h).

    For the kernels of an encoder they are the weights of its stack; for those of a decoder all others. Buffers are
    weights too: the correction of a router.

    All of these are read for it, at memory bandwidth: writes through `.data` can be detected in no other way.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    weights = [weight for name, weight in named if name.startswith("encoder.") is (stack == "encoder")]
    held = [weight.detach().contiguous() for weight in weights]
    ranges = (library.MemoryRange * len(held))(*[library.MemoryRange(p.data_ptr(), p.nbytes) for p in held])
    checksum = library.load().glass_checksum(ranges, len(ranges), torch.get_num_threads())
    return (checksum, *(number for p in weights for number in (p.data_ptr(), p.nbytes)))
