"""Pre-norm blocks for training on a GPU without torch.compile: matmuls of cuBLAS, and kernels for what lies between.

A step of such blocks is captured as a CUDA graph after a few steps, so that it does not matter how long Python takes to
launch it. No compiler is imported and nothing is traced: the first step starts seconds earlier. Forward and backward
of a block, with n1 and n2 its norms:

    h = n1(x);  x = x + attention(h);  h = n2(x);  x = x + feedforward(h)

`_AddNorm` computes x + branch and its norm in one pass, and in the backward pass the gradient of the norm, its sum with
the gradient of the residual stream, and the gradients of the norm's weights and of the bias before it. The matmuls are
in `projections`. Weights are cast to bfloat16, or have a copy in it (`copies`).
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from glassformer.config import ModelConfig
from glassformer.kernels.cuda.training import between, embedding
from glassformer.kernels.cuda.training.projections import can_join, feed, project, project_apart, project_without_bias
from glassformer.kernels.replacement import Replacement
from glassformer.model import Model
from glassformer.model.attention import Attention
from glassformer.model.block import PreNormBlock, Stack
from glassformer.model.context import NO_TAP, AttentionContext, ForwardContext, Tap, innermost
from glassformer.model.layers import ACTIVATIONS, Dense, Gated, LayerNorm, RMSNorm
from glassformer.model.positions import Rotation, apply_rotation
from glassformer.shapes import Float


def _in_step(module: nn.Module, device: torch.device) -> bool:
    """Return whether a call belongs to a training step. Other calls take the engine's own forward."""
    return module.training and torch.is_grad_enabled() and torch.is_autocast_enabled(device.type)


class Pending(NamedTuple):
    """A residual stream, and the output of a feed-forward that the next norm adds to it."""

    stream: Tensor
    branch: Tensor
    bias: Tensor | None
    """Is added with the branch: a projection that leaves its bias out."""


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        stream: Tensor,
        branch: Tensor | None,
        branch_bias: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        norm: between.Norm,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        branch = None if branch is None else branch.contiguous()
        total, out, statistics = between.norm_forward(stream.contiguous(), branch, branch_bias, weight, bias, norm)
        ctx.save_for_backward(total, statistics, weight)
        ctx.norm, ctx.added, ctx.biased, ctx.shifted = (
            norm,
            branch is not None,
            branch_bias is not None,
            bias is not None,
        )
        return total, out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        total, statistics, weight = ctx.saved_tensors
        d_sum, d_out = gradients
        d_out = torch.zeros(total.shape, dtype=torch.bfloat16, device=total.device) if d_out is None else d_out
        d_sum = None if d_sum is None else d_sum.contiguous()
        given = (d_out.contiguous(), d_sum, total, statistics, weight, ctx.norm, ctx.added, ctx.biased)
        d_stream, d_branch, d_norm = between.norm_backward(*given)
        return (
            d_stream, d_branch if ctx.added else None, d_norm[2] if ctx.biased else None,
            None if weight is None else d_norm[0], d_norm[1] if ctx.shifted else None, None,
        )  # fmt: skip


def add_norm(
    norm: nn.Module, stream: Tensor, branch: Tensor | None = None, branch_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return stream + branch (+ its bias), and the norm of that in bfloat16."""
    assert isinstance(norm, LayerNorm | RMSNorm)
    what = between.Norm(isinstance(norm, LayerNorm), norm.eps, norm.offset)
    out: tuple[Tensor, Tensor] = _AddNorm.apply(stream, branch, branch_bias, norm.weight, norm.bias, what)
    return out


def add_pending(norm: nn.Module, x: Tensor | Pending) -> tuple[Tensor, Tensor]:
    """Return the residual stream with what is pending, and its norm in bfloat16."""
    return add_norm(norm, *x) if isinstance(x, Pending) else add_norm(norm, x)


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor, halves: bool) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        ctx.halves = halves
        return _rotate(x, (cosines, sines), halves, 1.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _rotate(gradients[0], ctx.saved_tensors, ctx.halves, -1.0), None, None, None


def _rotate(x: Float[Tensor, "B T H K"], waves: Sequence[Tensor], halves: bool, sign: float) -> Tensor:
    x = x.contiguous()
    is_whole = 2 * waves[0].shape[-1] == x.shape[-1]
    out = torch.empty_like(x) if is_whole else x.clone()
    between.rotate(x.flatten(2), out.flatten(2), x.shape[2], x.shape[3], waves, halves, sign)
    return out


def merged_heads(attention: Attention, x: Float[Tensor, "B T D"], context: AttentionContext) -> Float[Tensor, "B T N"]:
    """Return what the output projection of self-attention reads. Heads stay (B,T,H,K) in memory.

    Queries, keys and values are parts of one matmul, whose heads are rotated in place. If the heads have norms, or
    positions that values do not read, each of the three has a matmul of its own.
    """
    layers, rotation = (attention.q, attention.k, attention.v), context.rotation
    counts = (attention.n_heads, attention.n_kv_heads, attention.n_kv_heads)
    plain = attention.q_norm is None and context.qk_embedding is None and can_join(layers)
    if plain and (rotation is None or _is_rotated_by_kernel(rotation, attention.q.out_features // attention.n_heads)):
        heads, width = attention.n_heads + attention.n_kv_heads, attention.q.out_features // attention.n_heads
        parts = project(x, *layers, heads=heads, width=width, rotation=rotation)
        q, k, v = (t.unflatten(-1, (n, -1)).transpose(1, 2) for t, n in zip(parts, counts, strict=True))
    else:
        if context.qk_embedding is None:
            q, k, v = project_apart(x, *layers)
        else:
            placed = x + context.qk_embedding.to(x.dtype)
            (q, k), (v,) = project_apart(placed, *layers[:2]), project_apart(x, layers[2])
        q = _prepare(attention, q, attention.n_heads, attention.q_norm, rotation)
        k = _prepare(attention, k, attention.n_kv_heads, attention.k_norm, rotation)
        v = _prepare(attention, v, attention.n_kv_heads)
    options = {"scale": attention.scale, "is_causal": context.is_causal, "enable_gqa": q.shape[1] != k.shape[1]}
    return attention.kernel(q, k, v, attn_mask=context.mask, **options).transpose(1, 2).flatten(2)


def _is_rotated_by_kernel(rotation: Rotation, width: int) -> bool:
    return between.supports_rotation(width, 2 * rotation.cos.shape[-1])


def _prepare(
    attention: Attention, x: Tensor, n_heads: int, norm: nn.Module | None = None, rotation: Rotation | None = None
) -> Float[Tensor, "B H T K"]:
    """As `Attention.prepare`, for norms over all heads or over each head, before the rotation."""
    if norm is not None and attention.norms_all:
        x = add_norm(norm, x)[1]
    heads = x.unflatten(-1, (n_heads, -1))
    if norm is not None and not attention.norms_all:
        heads = add_norm(norm, heads)[1]
    if rotation is None:
        return heads.transpose(1, 2)
    if not _is_rotated_by_kernel(rotation, heads.shape[-1]):
        return apply_rotation(heads.transpose(1, 2), rotation)
    waves = [wave.flatten(1, 2).contiguous() for wave in (rotation.cos, rotation.sin)]
    out: Tensor = _Rotated.apply(heads, *waves, rotation.pairing == "halves")
    return out.transpose(1, 2)


class FusedBlock(PreNormBlock):
    """A pre-norm block with each addition to the residual stream and the norm after it in one pass.

    It returns what its feed-forward adds as `Pending`, which the first norm of the next block, or the last norm, adds.
    """

    def forward(  # type: ignore[override]
        self, x: Tensor | Pending, context: ForwardContext, layer: int, tap: Tap = NO_TAP
    ) -> Tensor | Pending:
        device = (x.stream if isinstance(x, Pending) else x).device
        if not _in_step(self, device) or innermost(tap) is not NO_TAP or context.cache is not None:
            assert isinstance(x, Tensor)
            return super().forward(x, context, layer, tap)
        stream, normed = add_pending(self.norm_attention, x)
        heads, output = merged_heads(self.attention, normed, context.layers[layer]), self.attention.o
        part, last = self.feedforward, self.norm_feedforward
        assert isinstance(part, Dense | Gated)
        assert last is not None
        stream, normed = add_norm(last, stream, project_without_bias(heads, output), output.bias)
        inner = (part.up,) if isinstance(part, Dense) else (part.gate, part.up)
        fed = feed(normed, NAMES[part.activation], part.down, *inner)
        return Pending(stream, fed, part.down.bias)


NAMES = {function: name for name, function in ACTIVATIONS.items()}
"""The name of each activation function."""


class _Normed(nn.Module):
    """A norm alone, such as the last one of a stack."""

    def forward(self, x: Tensor | Pending) -> Tensor:
        if isinstance(x, Pending) or _in_step(self, x.device):
            return add_pending(self, x)[1]
        out: Tensor = super().forward(x)
        return out


class FusedLayerNorm(_Normed, LayerNorm):
    """LayerNorm by the kernels."""


class FusedRMSNorm(_Normed, RMSNorm):
    """RMSNorm by the kernels."""


def unsupported_widths(config: ModelConfig) -> str | None:
    """Return why the kernels do not support the widths of a model; None if they do."""
    widths, attention = [config.d_model], config.attention
    if attention.qk_norm is not None:
        heads = (config.n_heads, config.n_kv_heads) if attention.qk_norm_over == "all" else (1,)
        widths += [config.d_head * number for number in heads]
    reasons = [*map(between.unsupported_width, widths), between.unsupported_width(config.d_ff, normed=False)]
    return next((reason for reason in reasons if reason is not None), None)


def replacements(model: Model) -> Iterator[Replacement]:
    """Yield the embedding, the blocks and the last norm of a decoder."""
    yield from embedding.replacements(model)
    for module in model.modules():
        if isinstance(module, PreNormBlock):
            yield Replacement(module, FusedBlock)
        elif isinstance(module, Stack) and module.norm is not None:
            yield Replacement(module.norm, FusedLayerNorm if isinstance(module.norm, LayerNorm) else FusedRMSNorm)
