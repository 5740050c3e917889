"""Prompts on a GPU: torch's matmuls and attention, and three kernels for everything between them (prompt.cu).

Masks, positions and windows are those of the engine. A part that the kernels do not support is computed by its module.

Launching all this takes longer than computing a prompt of some hundred tokens. So prompts of up to `CAPTURED` tokens
are padded on the right, where causal attention does not see it, and the second prompt of a padded length is captured as
CUDA graphs. Captured or not, the same operations run, so the result does not depend on earlier calls.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import cache as computed_once
from itertools import accumulate
from typing import Any, assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer import config as c
from glassformer.kernels.cuda.graph import launches, parts, steps
from glassformer.kernels.cuda.graph.captured_prompt import CapturedPrompt, padded_length
from glassformer.kernels.cuda.graph.launches import STORED, Launch
from glassformer.model import DecoderLM, Seq2Seq
from glassformer.model.block import Block
from glassformer.model.cache import Cache, Static, build_cache
from glassformer.model.context import NO_TAP, AttentionContext, ForwardContext, forward_context
from glassformer.model.layers import Gated, LayerNorm, RMSNorm
from glassformer.model.moe import MoE
from glassformer.model.positions import NoPosition
from glassformer.shapes import Bool, Float, Int

Context = Callable[[], ForwardContext]
"""What returns positions and masks: they are computed when they are needed first, after the matmuls before them."""
CAPTURED = 2048
"""Tokens of all sequences up to which prompts are captured.

Longer ones keep the GPU busy while the host launches. Padding would cost them 3 to 6 % on average, and their keys,
values and hidden units would stay in memory (0.7 GB for 8,192 tokens of Llama-1B).
"""
JOINED, NARROW = 1024, 2**20
"""Queries, keys and values have one matmul from so many tokens on, if tokens times width of keys is at most NARROW.

A matmul for keys alone leaves half of an H200 idle then. With fewer tokens, copying the weights takes longer.
"""
MOST_GRAPHS = 4
"""Captured prompts that are kept for a model. Each holds keys, values and masks of its own."""
PACKS = 4
"""Loads of 16 bytes that a thread makes for a norm, if the row is not too long for all warps of a block."""
_LAST: "weakref.WeakKeyDictionary[Any, tuple[list[int], PromptReader]]" = weakref.WeakKeyDictionary()
"""The reader that was made last for each model, and the addresses of the weights that it was made for."""


def prompt_reader(model: DecoderLM | Seq2Seq, modules: Iterable[nn.Module]) -> "PromptReader | None":
    """Return what reads prompts in place of the model's decoder, or None if nothing of it is supported.

    `modules` are all modules of the model. Their weights are read in place, norms included: a reader is made again only
    if they move.
    """
    if not isinstance(model, DecoderLM) or model.dtype not in (torch.bfloat16, torch.float16):
        return None
    key = steps.addresses(modules)
    found = _LAST.get(model)
    if found is not None and found[0] == key:
        return found[1]
    if "model" in parts.unsupported_parts(model.config, 0) or steps.unsupported_device(model.device) is not None:
        return None
    made = PromptReader(model)
    _LAST[model] = (key, made)
    return made


class PromptReader:
    """Embedding and decoder of a model, which read the tokens of prompts into a static KV cache, many at once."""

    def __init__(self, model: DecoderLM):
        self.config, self.embed, self.stack, self.dtype = model.config, model.embed, model.decoder, model.dtype
        layers: list[tuple[int, Any]] = list(enumerate(self.stack.layers))
        self.attends = [
            parts.attention_is_fused(self.config, block, layer, self.dtype) and self._reads_norms_of(block.attention)
            for layer, block in layers
        ]
        self.feeds = [parts.feedforward_is_fused(self.config, block, layer, self.dtype) for layer, block in layers]
        self.sizes = (0, 0)
        """Sequences and new tokens of each."""
        self.prompts: dict[tuple[int, int], CapturedPrompt] = {}
        """By number of sequences and padded length, in order of their last use."""
        self.lock = threading.RLock()
        """Held while a prompt is launched: generations in other threads use the same buffers afterwards."""
        self.streams = [torch.cuda.Stream(model.device) for _ in range(3)] if model.device.type == "cuda" else []
        """Where prompts are captured: one in which most is computed, one for keys (or weights), one for values."""
        self.sides: list[torch.cuda.Stream] = []
        """The streams for keys and values, while a captured prompt is launched."""
        self.joint: dict[str, Tensor] = {}
        """While queries, keys and values have one matmul: weight and bias of that of the next layer."""
        self.layers = range(0)
        """The layers that are being computed."""
        rest = (self.stack.embed_norm, self.stack.project)
        self.adds_positions = type(self.stack.position).add is not NoPosition.add or rest != (None, None)
        """False if the first layer reads the token embedding as it is, so that no position is needed before it."""
        waits = any(isinstance(module, MoE) for module in self.stack.modules())
        self.is_capturable = all(self.attends) and not waits
        """False if the host must know what the GPU computed, or if the cache is not kept as these kernels keep it."""

    def _reads_norms_of(self, attention: Any) -> bool:
        """Return whether the kernel can norm queries and keys; a norm over all heads is computed by torch."""
        norms: tuple[Any, ...] = (
            () if attention.norms_all or attention.q_norm is None else (attention.q_norm, attention.k_norm)
        )
        return all(reads_norm(norm, self.dtype) and norm_macros(norm) == norm_macros(norms[0]) for norm in norms)

    @torch.no_grad()
    def __call__(
        self, tokens: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"] | None, cache: Cache | None
    ) -> Float[Tensor, "B 1 D"]:
        """Read tokens and return the hidden state of the last one of each sequence.

        `tokens` are on the host or on the device. `cache`: None if these are whole prompts and no token follows them:
        keys and values are not kept then.
        """
        (batch, new), device = tokens.shape, self.embed.tokens.weight.device
        length = padded_length(new, self.config.max_len, self.config.changes_frequencies_at)
        is_whole = mask is None and (cache is None or not cache.length)
        with self.lock:
            if is_whole and self.is_capturable and batch * length <= CAPTURED:
                return self._replay(tokens, length, cache)
            held = build_cache(self.stack.windows, "static", device, new) if cache is None else cache
            x = self.embed(tokens.to(device, non_blocking=True))
            # positions and masks are computed after the first matmuls are launched: the GPU is busy with those
            context = computed_once(lambda: self.context(x, mask, held))
            return self._hidden(self.compute(x, context, held, range(len(self.attends)))[:, -1:])

    def _replay(self, tokens: Int[Tensor, "B T"], length: int, cache: Cache | None) -> Float[Tensor, "B 1 D"]:
        """Read whole prompts of one length, as graphs from the second time on."""
        batch, new = tokens.shape
        prompt = self.prompts.pop((batch, length), None) or CapturedPrompt(self, batch, length)
        self.prompts[batch, length] = prompt  # the newest is last
        if len(self.prompts) > MOST_GRAPHS:
            del self.prompts[next(iter(self.prompts))]
        hidden = self._hidden(prompt.read(self, tokens)[:, new - 1 : new])
        if cache is None:
            return hidden
        cache.append(new)
        for mine, held in zip(self.allocate(cache, batch), prompt.stored, strict=True):
            # as numbers of 16 bytes: torch copies a part of a buffer number by number
            mine.view(torch.complex128)[..., :new, :].copy_(held.view(torch.complex128)[..., :new, :])
        return hidden

    def _hidden(self, x: Float[Tensor, "B 1 D"]) -> Float[Tensor, "B 1 D"]:
        return x.clone() if self.stack.norm is None else self.stack.norm(x)

    def context(self, x: Float[Tensor, "B T W"], mask: Bool[Tensor, "B T"] | None, cache: Cache) -> ForwardContext:
        """Return positions and masks of embedded tokens, and record them in the cache."""
        stack = self.stack
        return forward_context(
            x, stack.position, stack.windows, stack.causal, mask, cache=cache, kinds=stack.kinds,
            score_bias=stack.score_bias,
        )  # fmt: skip

    def compute(
        self, x: Float[Tensor, "B T W"], context: Context, cache: Cache, layers: range
    ) -> Float[Tensor, "B T D"]:
        """Return the residual stream after some layers, the first of which reads the embedding. x is overwritten."""
        self.sizes, self.layers = (x.shape[0], x.shape[1]), layers
        self._copy_weights(layers.start)
        if self.adds_positions and not layers.start:
            x = self.stack.add_positions(x, context().positions)
        x, blocks = x.flatten(0, 1).contiguous(), self.stack.layers
        for layer in layers:
            x = self._block(layer, blocks[layer], context, cache, x)
        return x.unflatten(0, self.sizes)

    def _block(self, layer: int, block: Any, context: Context, cache: Cache, x: Tensor) -> Tensor:
        """Return the stream after a block, with the norms where its placement has them."""
        norm = self._norm

        def attend(h: Tensor, into: Tensor | None = None) -> Tensor:
            return self._attend(layer, block, h, context, cache, into)

        def feed(h: Tensor, into: Tensor | None = None) -> Tensor:
            return self._feed(layer, block, h, into)

        has_feed = block.feedforward is not None
        match self.config.placement:
            case "pre":
                x = attend(norm(block.norm_attention, x), x)
                return feed(norm(block.norm_feedforward, x), x) if has_feed else x
            case "parallel":
                h = norm(block.norm, x)
                return feed(h, attend(h, x))
            case "parallel_two":
                h, g = norm(block.norm_attention, x), norm(block.norm_feedforward, x)
                return feed(g, attend(h, x))
            case "after":
                x = norm(block.norm_attention, attend(x), x)
                return norm(block.norm_feedforward, feed(x), x) if has_feed else x
            case "sandwich":
                x = norm(block.norm_attention_out, attend(norm(block.norm_attention, x)), x)
                if not has_feed:
                    return x
                return norm(block.norm_feedforward_out, feed(norm(block.norm_feedforward, x)), x)
            case "post":
                x = norm(block.norm_attention, attend(x), x, is_last=True)
                return norm(block.norm_feedforward, feed(x), x, is_last=True) if has_feed else x
            case _:
                assert_never(self.config.placement)

    def _norm(self, norm: Any, x: Tensor, into: Tensor | None = None, is_last: bool = False) -> Tensor:
        """Return norm(x), or add it to a stream; `is_last` adds x to the stream and norms that. The stream changes."""
        if not reads_norm(norm, self.dtype):
            return norm(self._add(x, into)) if is_last else self._add(norm(x), into)
        out, x = torch.empty_like(x) if into is None else into, x.contiguous()
        rows, width = x.shape
        warps = 1
        while warps < launches.WARPS and width > 8 * 32 * warps * PACKS:
            warps *= 2
        macros = {**norm_macros(norm), "ADD": 0 if into is None else 1 + is_last, "WIDTH": width}
        given = {
            "x": x, "out": out, "count": rows, "scale": self.config.residual_scale, "weight": norm.weight,
            "bias": norm.bias, "eps": norm.eps, "offset": norm.offset,
        }  # fmt: skip
        self._launch("normalize", {**macros, "WARPS_OF_ROW": warps}, given, rows * warps * 32)
        return out

    def _launch(self, kernel: str, macros: dict[str, int], given: dict[str, Any], threads: int) -> None:
        macros |= {"STORED": STORED[self.dtype], "OPERAND_IS_BF16": int(self.dtype is torch.bfloat16)}
        Launch("prompt", kernel, macros, given, -(-threads // (32 * launches.WARPS))).run()

    def _attend(
        self, layer: int, block: Block, h: Tensor, context: Context, cache: Cache, into: Tensor | None
    ) -> Tensor:
        module: Any = block.attention
        if not self.attends[layer]:
            return self._add(module(h.unflatten(0, self.sizes), context().layers[layer]).flatten(0, 1), into)
        projected, own = self._project(layer, module, h), context().layers[layer]
        if module.q_norm is not None and module.norms_all:
            projected = [module.q_norm(projected[0]), module.k_norm(projected[1]), projected[2]]
        heads, keys, values = self._prepare(projected, module, own, cache)
        if module.softcap is not None or module.sinks is not None:
            return self._add(module.attend(heads, keys, values, own, NO_TAP).flatten(0, 1), into)
        mask = None if own.mask is None else own.mask[..., -keys.shape[2] :]
        mixed = module.kernel(
            heads, keys, values, attn_mask=mask, is_causal=own.is_causal, scale=module.scale,
            enable_gqa=module.n_heads != module.n_kv_heads,
        )  # fmt: skip
        return self._finish(mixed.transpose(1, 2).reshape(len(h), -1), module.o, into)

    def _project(self, layer: int, module: Any, h: Tensor) -> list[Float[Tensor, "N C"]]:
        """Return the projections: queries, keys and values, before anything is done to their heads.

        Of a short prompt the matmuls of keys and of values leave most of the GPU idle. They have streams of their own
        then, or there is one matmul for all three.
        """
        if self.joint:
            self._await(self.sides[:1])
            whole = F.linear(h, **self.joint)
            self._copy_weights(layer + 1)
            return list(whole.split([part.out_features for part in (module.q, module.k, module.v)], dim=1))
        found = []
        for number, part in enumerate((module.k, module.v)):
            with self._aside(number):
                found.append(_linear(h, part))
        found.insert(0, _linear(h, module.q))
        self._await(self.sides)
        return found

    def _copy_weights(self, layer: int) -> None:
        """Copy the weights of a layer's projections into one matrix, while other parts of the prompt are computed."""
        if not self.joint or layer not in self.layers:
            return
        module: Any = self.stack.layers[layer].attention
        with self._aside(0):  # after the matmul that has read what is overwritten
            for name, out in self.joint.items():
                torch.cat([getattr(part, name) for part in (module.q, module.k, module.v)], out=out)

    def joint_weights(self, tokens: int) -> dict[str, Tensor]:
        """Return room for the weights of three projections, empty if each has a matmul of its own."""
        if not joins_projections(self.config, tokens):
            return {}
        first: Any = self.stack.layers[0].attention
        rows = sum(part.out_features for part in (first.q, first.k, first.v))
        room = {"weight": first.q.weight.new_empty(rows, first.q.in_features)}
        return room if first.q.bias is None else {**room, "bias": first.q.bias.new_empty(rows)}

    @contextlib.contextmanager
    def _aside(self, number: int) -> Iterator[None]:
        """Launch on a stream for keys or values, if there is one, after what is launched on the present stream."""
        if not self.sides:
            yield
            return
        self.sides[number].wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.sides[number]):
            yield

    def _await(self, sides: list[torch.cuda.Stream]) -> None:
        for side in sides:
            torch.cuda.current_stream().wait_stream(side)

    def _prepare(
        self, projected: list[Float[Tensor, "N C"]], module: Any, context: AttentionContext, cache: Cache
    ) -> tuple[Float[Tensor, "B H T K"], Float[Tensor, "B G S K"], Float[Tensor, "B G S U"]]:
        """Norm, clip and rotate the heads of projections. Return queries, and the keys and values of the cache."""
        store, rotation = context.cache, context.rotation
        assert isinstance(store, Static)
        if store.k is None:
            self.allocate(cache, self.sizes[0])
        assert store.k is not None
        assert store.v is not None
        q = projected[0]
        q = q if q.is_contiguous() else torch.empty(q.shape, dtype=q.dtype, device=q.device)
        queries = q.unflatten(0, self.sizes).unflatten(-1, (module.n_heads, -1)).transpose(1, 2)
        out = (queries, *(held[:, :, cache.length - cache.new : cache.length] for held in (store.k, store.v)))
        norms: tuple[Any, ...] = () if module.q_norm is None or module.norms_all else (module.q_norm, module.k_norm)
        widths = [one.shape[-1] for one in out]
        lanes = 1 << (max(widths) // 8 - 1).bit_length()
        ends = list(accumulate(-(-one.shape[1] * len(projected[0]) * lanes // (32 * launches.WARPS)) for one in out))
        given: dict[str, Any] = {
            "projected": projected, "prepared": out, "count": len(projected[0]), "tokens": self.sizes[1],
            "clip": module.clip or 0.0, "heads": [one.shape[1] for one in out], "first_block": [0, *ends[:2]],
            "row_step": [part.stride(0) for part in projected],
            "norm_weight": [norm.weight for norm in norms], "norm_bias": [norm.bias for norm in norms],
            "norm_eps": [norm.eps for norm in norms], "norm_offset": [norm.offset for norm in norms],
        }  # fmt: skip
        for axis, name in enumerate(("sequence_step", "head_step", "token_step")):
            given[name] = [one.stride(axis) for one in out]
        macros = {
            "LANES": lanes, "WIDTH": widths[0], "VALUE_WIDTH": widths[2], "ROTATED": 0, "HALVES": 0,
            **norm_macros(norms[0] if norms else None), "NORM_LAST": int(module.norms_last),
        }  # fmt: skip
        macros["NORM_OVER"] = int(bool(macros["WEIGHT"]) and norms[0].weight.dim() == 2)
        if rotation is not None:
            cosines, sines = rotation.cos.contiguous(), rotation.sin.contiguous()
            macros |= {"ROTATED": 2 * cosines.shape[-1], "HALVES": int(rotation.pairing == "halves")}
            given |= {"cosines": cosines, "sines": sines, "own_waves": int(cosines.shape[0] > 1)}
        self._launch("prepare_heads", macros, given, ends[2] * 32 * launches.WARPS)
        return queries, store.k[:, :, : cache.length], store.v[:, :, : cache.length]

    def allocate(self, cache: Cache, batch: int) -> tuple[Tensor, Tensor]:
        """Give the layers of a cache their buffers, which are parts of the two tensors that are returned.

        What no token of the cache fills is zero: a captured step reads all of a buffer, and 0 times a NaN is a NaN.
        """
        stores: list[Any] = [store for store, fused in zip(cache.layers, self.attends, strict=True) if fused]
        shape = (len(stores), batch, self.config.n_kv_heads, stores[0].capacity)
        widths = (self.config.d_head, self.config.d_value)
        keys, values = (torch.empty(*shape, n, dtype=self.dtype, device=cache.device) for n in widths)
        for held in (keys, values) if cache.length < stores[0].capacity else ():
            held[..., cache.length :, :] = 0.0
        for store, k, v in zip(stores, keys.unbind(), values.unbind(), strict=True):
            store.k, store.v = k, v
        return keys, values

    def _feed(self, layer: int, block: Block, h: Tensor, into: Tensor | None) -> Tensor:
        module: Any = block.feedforward
        spec = self.config.layer_feedforward(layer)
        if not self.feeds[layer] or isinstance(spec, c.MoE):
            return self._add(module(h, NO_TAP), into)
        if not isinstance(module, Gated):
            return self._finish(module.activation(_linear(h, module.up)), module.down, into)
        assert isinstance(spec, c.Gated)
        gate, up = _linear(h, module.gate), _linear(h, module.up)
        given = {"x": gate, "up": up, "count": gate.numel(), "limit": spec.limit or 0.0, "up_offset": spec.up_offset}
        self._launch("apply_gate", {"ACTIVATION": parts.activation_number(spec)}, given, gate.numel() // 8)
        return self._finish(gate, module.down, into)

    def _finish(self, x: Tensor, layer: nn.Linear, into: Tensor | None) -> Tensor:
        """Return the output projection of a branch. The matmul itself adds it to the stream, if it has no bias."""
        if into is None or layer.bias is not None:
            return self._add(_linear(x, layer), into)
        return torch.addmm(into, x, layer.weight.t(), alpha=self.config.residual_scale, out=into)

    def _add(self, branch: Tensor, into: Tensor | None) -> Tensor:
        return branch if into is None else into.add_(branch, alpha=self.config.residual_scale)


def joins_projections(config: c.ModelConfig, tokens: int) -> bool:
    """Return whether queries, keys and values of a captured prompt have one matmul."""
    return tokens >= JOINED and tokens * config.n_kv_heads * config.d_head <= NARROW


def _linear(x: Tensor, layer: nn.Linear) -> Tensor:
    return F.linear(x, layer.weight, layer.bias)


def reads_norm(norm: object, dtype: torch.dtype) -> bool:
    """Return whether the kernels can read the weight and the bias of a norm in place."""
    if not isinstance(norm, LayerNorm | RMSNorm):
        return False
    held = [p for p in (norm.weight, norm.bias) if p is not None]
    return all(p.dtype is dtype and p.is_contiguous() and p.data_ptr() % 16 == 0 for p in held)


def norm_macros(norm: Any) -> dict[str, int]:
    """Return what prompt.cu knows of a norm when it is compiled. NORM: 0 none, 1 RMS norm, 2 layer norm."""
    if norm is None:
        return {"NORM": 0, "WEIGHT": 0, "BIAS": 0}
    kind = 2 if isinstance(norm, LayerNorm) else 1
    return {"NORM": kind, "WEIGHT": int(norm.weight is not None), "BIAS": int(norm.bias is not None)}
