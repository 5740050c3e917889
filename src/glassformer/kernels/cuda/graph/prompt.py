"""Prompts on a GPU: torch's matmuls and attention, and two kernels for everything between them (prompt.cu).

Masks, positions and windows are those of the engine. A part that the kernels do not support is computed by its module.

Launching all this takes longer than computing a prompt of some hundred tokens. So prompts of up to `CAPTURED` tokens
are padded on the right, where causal attention does not see it, and the second prompt of a padded length is captured as
a CUDA graph. Captured or not, the same operations run, so the result does not depend on earlier calls.
"""

import threading
import weakref
from typing import Any, assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer import config as c
from glassformer.kernels.cuda.graph import launches, parts, steps
from glassformer.kernels.cuda.graph.launches import STORED, Launch
from glassformer.kernels.cuda.graph.linear import NormFactors, norm_factors
from glassformer.model import DecoderLM, Seq2Seq
from glassformer.model.block import Block
from glassformer.model.cache import Cache, Static, build_cache
from glassformer.model.context import NO_TAP, AttentionContext, forward_context
from glassformer.model.layers import Gated
from glassformer.model.moe import MoE
from glassformer.shapes import Bool, Float, Int

CAPTURED = 2048
"""Tokens of all sequences up to which prompts are captured. Longer ones keep the GPU busy while the host launches."""
MOST_GRAPHS = 4
"""Captured prompts that are kept for a model. Each holds keys and values of its own."""
_LAST: "weakref.WeakKeyDictionary[Any, tuple[Any, PromptReader]]" = weakref.WeakKeyDictionary()
"""The reader that was made last for each model, and the weights that it was made for."""


def prompt_reader(model: DecoderLM | Seq2Seq) -> "PromptReader | None":
    """Return what reads prompts in place of the model's decoder, or None if nothing of it is supported."""
    if not isinstance(model, DecoderLM) or next(model.parameters()).dtype not in (torch.bfloat16, torch.float16):
        return None
    key = steps.fingerprint(model)
    made_for, made = _LAST.get(model, (None, None))
    if made_for != key:
        if "model" in parts.unsupported_parts(model.config, 0) or steps.unsupported_device(model.device) is not None:
            return None
        made = PromptReader(model)
        _LAST[model] = (key, made)
    return made


class PromptReader:
    """A decoder that reads the tokens of prompts into a static KV cache, many at once."""

    def __init__(self, model: DecoderLM):
        self.config, self.stack = model.config, model.decoder
        self.dtype = next(model.parameters()).dtype
        layers = list(enumerate(self.stack.layers))
        self.attends = [parts.attention_is_fused(self.config, block, layer, self.dtype) for layer, block in layers]  # type: ignore[arg-type]
        self.feeds = [parts.feedforward_is_fused(self.config, block, layer, self.dtype) for layer, block in layers]  # type: ignore[arg-type]
        self.norms = [self._qk_norms(block) for _, block in layers]
        self.sizes = (0, 0)
        """Sequences and new tokens of each."""
        self.prompts: dict[tuple[int, int], CapturedPrompt] = {}
        """By number of sequences and padded length, in order of their last use."""
        self.lock = threading.RLock()
        """Held while a prompt is launched: generations in other threads use the same buffers afterwards."""
        self.pool: Any = None
        """The GPU memory in which all captured prompts compute."""
        waits = any(isinstance(module, MoE) for module in self.stack.modules())
        self.is_capturable = all(self.attends) and not waits
        """False if the host must know what the GPU computed, or if the cache is not kept as these kernels keep it."""

    def _qk_norms(self, block: Any) -> tuple[NormFactors, NormFactors]:
        """The norms of queries and keys that the kernel computes; one over all heads is computed by torch."""
        module = block.attention
        if self.config.attention.qk_norm is None or self.config.attention.qk_norm_over == "all":
            return NormFactors(0), NormFactors(0)
        return norm_factors(module.q_norm), norm_factors(module.k_norm)

    @torch.no_grad()
    def __call__(
        self, x: Float[Tensor, "B T W"], mask: Bool[Tensor, "B T"] | None, cache: Cache
    ) -> Float[Tensor, "B 1 D"]:
        """Read embedded tokens and return the hidden state of the last one of each sequence. x is overwritten."""
        with self.lock:
            return self._read(x, mask, cache) if mask is not None or cache.length else self._replay(x, cache)

    def _replay(self, x: Float[Tensor, "B T W"], cache: Cache) -> Float[Tensor, "B 1 D"]:
        """Read whole prompts of one length: those that are not too long as a graph."""
        batch, tokens = x.shape[:2]
        length = padded_length(tokens, self.config.max_len, self.config.changes_frequencies_at)
        if not self.is_capturable or batch * length > CAPTURED:
            return self._read(x, None, cache)
        prompt = self.prompts.pop((batch, length), None) or CapturedPrompt(self, x, length)
        self.prompts[batch, length] = prompt  # the newest is last
        if len(self.prompts) > MOST_GRAPHS:
            del self.prompts[next(iter(self.prompts))]
        hidden = prompt.read(self, x).clone()
        cache.append(tokens)
        self.sizes = (batch, tokens)
        for mine, held in zip(self._allocate(cache, x), prompt.stored, strict=True):
            mine[..., :tokens, :].copy_(held[..., :tokens, :])
        return hidden

    def _read(
        self,
        x: Float[Tensor, "B T W"],
        mask: Bool[Tensor, "B T"] | None,
        cache: Cache,
        last: Int[Tensor, "1"] | None = None,
    ) -> Float[Tensor, "B 1 D"]:
        """`last` is the index of the token whose hidden state is returned."""
        stack = self.stack
        context = forward_context(
            x, stack.position, stack.windows, stack.causal, mask, cache=cache, kinds=stack.kinds,
            score_bias=stack.score_bias,
        )  # fmt: skip
        self.sizes = (x.shape[0], x.shape[1])
        x = stack.add_positions(x, context.positions).flatten(0, 1).contiguous()
        for layer, block in enumerate(stack.layers):
            x = self._block(layer, block, context.layers[layer], cache, x)
        x = x.unflatten(0, self.sizes)
        x = x[:, -1:] if last is None else x.index_select(1, last)
        return x if stack.norm is None else stack.norm(x)

    def _block(self, layer: int, block: Any, context: AttentionContext, cache: Cache, x: Tensor) -> Tensor:
        """Return the stream after a block, with the norms where its placement has them."""

        def attend(h: Tensor, into: Tensor | None = None) -> Tensor:
            return self._attend(layer, block, h, context, cache, into)

        def feed(h: Tensor, into: Tensor | None = None) -> Tensor:
            return self._feed(layer, block, h, into)

        has_feed = block.feedforward is not None
        match self.config.placement:
            case "pre":
                x = attend(block.norm_attention(x), x)
                return feed(block.norm_feedforward(x), x) if has_feed else x
            case "parallel":
                h = block.norm(x)
                return feed(h, attend(h, x))
            case "parallel_two":
                h, g = block.norm_attention(x), block.norm_feedforward(x)
                return feed(g, attend(h, x))
            case "after":
                x = block.add(x, block.norm_attention(attend(x)))
                return block.add(x, block.norm_feedforward(feed(x))) if has_feed else x
            case "sandwich":
                x = block.add(x, block.norm_attention_out(attend(block.norm_attention(x))))
                if not has_feed:
                    return x
                return block.add(x, block.norm_feedforward_out(feed(block.norm_feedforward(x))))
            case "post":
                x = block.norm_attention(block.add(x, attend(x)))
                return block.norm_feedforward(block.add(x, feed(x))) if has_feed else x
            case _:
                assert_never(self.config.placement)

    def _attend(
        self, layer: int, block: Block, h: Tensor, context: AttentionContext, cache: Cache, into: Tensor | None
    ) -> Tensor:
        module: Any = block.attention
        if not self.attends[layer]:
            return self._add(module(h.unflatten(0, self.sizes), context).flatten(0, 1), into)
        q, k, v = (_linear(h, part) for part in (module.q, module.k, module.v))
        if module.q_norm is not None and module.norms_all:
            q, k = module.q_norm(q), module.k_norm(k)
        keys, values = self._prepare(layer, q, k, v, context, cache)
        heads = q.unflatten(0, self.sizes).unflatten(-1, (module.n_heads, -1)).transpose(1, 2)
        if module.softcap is not None or module.sinks is not None:
            return self._add(module.attend(heads, keys, values, context, NO_TAP).flatten(0, 1), into)
        mask = None if context.mask is None else context.mask[..., -keys.shape[2] :]
        mixed = module.kernel(
            heads, keys, values, attn_mask=mask, is_causal=context.is_causal, scale=module.scale,
            enable_gqa=module.n_heads != module.n_kv_heads,
        )  # fmt: skip
        return self._finish(mixed.transpose(1, 2).reshape(len(h), -1), module.o, into)

    def _prepare(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, cache: Cache
    ) -> tuple[Tensor, Tensor]:
        """Norm and rotate queries in place, and keys and values into the cache; return its filled part."""
        cfg, store = self.config, context.cache
        assert isinstance(store, Static)
        H, G, K, U = cfg.n_heads, cfg.n_kv_heads, cfg.d_head, cfg.d_value
        sequences, tokens = self.sizes
        if store.k is None or store.v is None:
            self._allocate(cache, k)
        assert store.k is not None
        assert store.v is not None
        rotation, (q_norm, k_norm) = context.rotation, self.norms[layer]
        given: dict[str, Any] = {
            "q": q, "k": k, "v": v, "keys": store.k, "values": store.v, "count": sequences * tokens * (H + 2 * G),
            "q_weight": q_norm.weight, "q_bias": q_norm.bias, "k_weight": k_norm.weight, "k_bias": k_norm.bias,
            "eps": q_norm.eps, "clip": cfg.attention.clip or 0.0, "tokens": tokens, "first": cache.length - tokens,
            "capacity": store.capacity,
        }  # fmt: skip
        rotated = 0
        if rotation is not None:
            rotated, own = 2 * rotation.cos.shape[-1], rotation.cos.shape[0] > 1
            waves = (rotation.cos.to(self.dtype).contiguous(), rotation.sin.to(self.dtype).contiguous())
            given |= {"cosines": waves[0], "sines": waves[1], "own_waves": int(own)}
        lanes = 1 << (max(K, U) // 8 - 1).bit_length()
        macros = {
            "STORED": STORED[self.dtype], "OPERAND_IS_BF16": int(self.dtype is torch.bfloat16), "H": H, "G": G, "K": K,
            "U": U, "ROTATED": rotated, "HALVES": int(rotation is not None and rotation.pairing == "halves"),
            "QK_NORM": q_norm.kind, "NORM_OVER": int(cfg.attention.qk_norm_over == "heads"),
            "NORM_LAST": int(cfg.attention.qk_norm_after_rotation), "LANES": lanes,
        }  # fmt: skip
        blocks = -(-given["count"] * lanes // (32 * launches.WARPS))
        Launch("prompt", "prepare_heads", macros, given, blocks).run()
        return store.k[:, :, : cache.length], store.v[:, :, : cache.length]

    def _allocate(self, cache: Cache, like: Tensor) -> tuple[Tensor, Tensor]:
        """Give the layers of an empty cache their buffers, which are parts of the two tensors that are returned."""
        stores: list[Any] = [store for store, fused in zip(cache.layers, self.attends, strict=True) if fused]
        shape = (len(stores), self.sizes[0], self.config.n_kv_heads, stores[0].capacity)
        keys, values = like.new_zeros(*shape, self.config.d_head), like.new_zeros(*shape, self.config.d_value)
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
        given = {
            "gate": gate, "up": up, "count": gate.numel(), "limit": spec.limit or 0.0, "up_offset": spec.up_offset,
        }  # fmt: skip
        macros = {
            "STORED": STORED[self.dtype], "OPERAND_IS_BF16": int(self.dtype is torch.bfloat16),
            "ACTIVATION": parts.activation_number(spec),
        }  # fmt: skip
        blocks = -(-gate.numel() // (8 * 32 * launches.WARPS))
        Launch("prompt", "apply_gate", macros, given, blocks).run()
        return self._finish(gate, module.down, into)

    def _finish(self, x: Tensor, layer: nn.Linear, into: Tensor | None) -> Tensor:
        """Return the output projection of a branch. The matmul itself adds it to the stream, if it has no bias."""
        if into is None or layer.bias is not None:
            return self._add(_linear(x, layer), into)
        return torch.addmm(into, x, layer.weight.t(), alpha=self.config.residual_scale, out=into)

    def _add(self, branch: Tensor, into: Tensor | None) -> Tensor:
        return branch if into is None else into.add_(branch, alpha=self.config.residual_scale)


class CapturedPrompt:
    """Prompts of one padded length: buffers, and from the second prompt on a CUDA graph that fills them."""

    def __init__(self, reader: PromptReader, like: Float[Tensor, "B T W"], length: int):
        batch, device = like.shape[0], like.device
        self.x = like.new_zeros(batch, length, like.shape[2])
        self.last = torch.zeros(1, dtype=torch.long, device=device)
        self.cache = build_cache(reader.stack.windows, "static", device, length)
        reader.sizes = (batch, length)
        self.stored = reader._allocate(self.cache, like)
        """Keys and values (layers, B, G, length, K or U)."""
        self.hidden: Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None

    def read(self, reader: PromptReader, x: Float[Tensor, "B T W"]) -> Float[Tensor, "B 1 D"]:
        """Return the hidden state of the last token. It is overwritten by the next prompt."""
        tokens = x.shape[1]
        self.x[:, :tokens] = x
        self.x[:, tokens:] = 0.0  # the last pass has overwritten it
        self.last.fill_(tokens - 1)
        if self.graph is None and self.hidden is not None and x.is_cuda:
            self._capture(reader)
        if self.graph is None:
            self.hidden = self._compute(reader)
        else:
            self.graph.replay()
        assert self.hidden is not None
        return self.hidden

    def _compute(self, reader: PromptReader) -> Float[Tensor, "B 1 D"]:
        self.cache.crop(0)
        return reader._read(self.x, None, self.cache, self.last)

    def _capture(self, reader: PromptReader) -> None:
        """Capture what the first prompt has computed. Nothing is computed meanwhile."""
        reader.pool = reader.pool or torch.cuda.graph_pool_handle()
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # not torch.cuda.graph, which collects garbage and returns unused memory: some tenths of a second
            graph.capture_begin(pool=reader.pool, capture_error_mode="thread_local")
            try:
                self.hidden = self._compute(reader)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = graph


def padded_length(tokens: int, most: int | None, changes_at: int | None) -> int:
    """Return the length to which a prompt is padded: at most an eighth more, or a multiple of 64 if it is short.

    `most`: positions of the model. `changes_at`: longer prompts than this have other frequencies.
    """
    step = max(64, 1 << tokens.bit_length() >> 4)
    length = -(-tokens // step) * step
    limits = [limit for limit in (most, changes_at) if limit is not None and limit >= tokens]
    return min(length, *limits) if limits else length


def _linear(x: Tensor, layer: nn.Linear) -> Tensor:
    return F.linear(x, layer.weight, layer.bias)
