"""Prompts on a GPU: torch's matmuls and attention, and two kernels for everything between them (prompt.cu).

Masks, positions and windows are those of the engine. A part that the kernels do not support is computed by its module.
"""

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
from glassformer.model.cache import Cache, Static
from glassformer.model.context import NO_TAP, AttentionContext, forward_context
from glassformer.model.layers import Gated
from glassformer.shapes import Bool, Float

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
        stack = self.stack
        context = forward_context(
            x, stack.position, stack.windows, stack.causal, mask, cache=cache, kinds=stack.kinds,
            score_bias=stack.score_bias,
        )  # fmt: skip
        self.sizes = (x.shape[0], x.shape[1])
        x = stack.add_positions(x, context.positions).flatten(0, 1).contiguous()
        for layer, block in enumerate(stack.layers):
            x = self._block(layer, block, context.layers[layer], cache, x)
        x = x.unflatten(0, self.sizes)[:, -1:]
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
        macros = {
            "STORED": STORED[self.dtype], "OPERAND_IS_BF16": int(self.dtype is torch.bfloat16), "H": H, "G": G, "K": K,
            "U": U, "ROTATED": rotated, "HALVES": int(rotation is not None and rotation.pairing == "halves"),
            "QK_NORM": q_norm.kind, "NORM_OVER": int(cfg.attention.qk_norm_over == "heads"),
            "NORM_LAST": int(cfg.attention.qk_norm_after_rotation),
        }  # fmt: skip
        blocks = -(-given["count"] // launches.WARPS)
        Launch("prompt", "prepare_heads", macros, given, blocks).run()
        return store.k[:, :, : cache.length], store.v[:, :, : cache.length]

    def _allocate(self, cache: Cache, like: Tensor) -> None:
        """Give the layers of an empty cache their buffers, which are parts of two tensors: two calls for all."""
        stores: list[Any] = [store for store, fused in zip(cache.layers, self.attends, strict=True) if fused]
        shape = (len(stores), self.sizes[0], self.config.n_kv_heads, stores[0].capacity)
        keys, values = like.new_zeros(*shape, self.config.d_head), like.new_zeros(*shape, self.config.d_value)
        for store, k, v in zip(stores, keys.unbind(), values.unbind(), strict=True):
            store.k, store.v = k, v

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


def _linear(x: Tensor, layer: nn.Linear) -> Tensor:
    return F.linear(x, layer.weight, layer.bias)
