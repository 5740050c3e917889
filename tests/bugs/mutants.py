"""The engine, wrong in one way at a time: what a check of the engine must notice, or it checks nothing.

    with MUTANTS["no_scale"]():
        ...   # every glassformer model computes wrongly here, those built before included

Each patches functions of `glassformer.model` and undoes itself, also when an exception passes. A mutant that concerns
one scheme (rotary, ALiBi, pre-norm, ...) leaves models of other schemes as they are.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.model import attention, context, layers, positions
from glassformer.model.attention import Attention
from glassformer.model.block import PostNormBlock, PreNormBlock, Stack
from glassformer.model.cache import Cache
from glassformer.model.context import NO_TAP, AttentionContext, Tap
from glassformer.model.layers import LayerNorm, RMSNorm
from glassformer.model.positions import Alibi, Rotation

Mutant = Callable[[], AbstractContextManager[None]]


@contextmanager
def _patched(*targets: tuple[Any, str, Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, new in targets:
            stack.enter_context(patch.object(owner, name, new))
        yield


def _mutant(*targets: tuple[Any, str, Any]) -> Mutant:
    return lambda: _patched(*targets)


# masks

FORWARD, ATTEND, PROJECT_KV = Attention.forward, Attention.attend, Attention.project_kv


def _viewing(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Attention whose mask (T,S), causal or given, goes through `change`; attention without a mask is left alone."""

    def attend(self, q, k, v, context, tap):
        mask = context.mask
        if context.is_causal:
            mask = torch.ones(k.shape[2], k.shape[2], dtype=torch.bool).tril()[None, None]
        if mask is not None and mask.dtype is torch.bool:
            context = AttentionContext(change(mask))
        elif mask is not None:  # a bias, -inf where it forbids
            context = AttentionContext(mask.nan_to_num(neginf=0.0).masked_fill(~change(mask > -torch.inf), -torch.inf))
        return ATTEND(self, q, k, v, context, tap)

    return attend


def _own(mask: Tensor) -> Tensor:
    T, S = mask.shape[-2:]
    return torch.ones(T, S, dtype=torch.bool).tril(S - T).triu(S - T)


def _flipped(mask: Tensor) -> Tensor:
    return ~mask | _own(mask)


def _one_too_wide(mask: Tensor) -> Tensor:
    return mask | _own(mask).roll(1, -1).triu(mask.shape[-1] - mask.shape[-2] + 1)


def _all_are_real(real: Tensor) -> Tensor:
    return torch.ones_like(real)[:, None, None, :]


# scale, projections, softmax


def _scaled(scale: Callable[[int], float]) -> Callable[..., Tensor]:
    def attend(self, q, k, *rest, **named):
        before, self.scale = self.scale, scale(k.shape[-1])
        try:
            return ATTEND(self, q, k, *rest, **named)
        finally:
            self.scale = before

    return attend


def _values_transposed(self, x, placed=None, rotation=None):
    """W_v read the wrong way round, as a checkpoint of another layout would be."""
    k, _ = PROJECT_KV(self, x, placed, rotation)
    wrong = self.v.weight.T.reshape(self.v.weight.shape)
    return k, F.linear(x, wrong, self.v.bias).unflatten(-1, (self.n_kv_heads, -1)).transpose(1, 2)


def _values_rotated(self, x, placed=None, rotation=None):
    k, v = PROJECT_KV(self, x, placed, rotation)
    return k, v if rotation is None else positions.apply_rotation(v, rotation)


class _Edit:
    """A tap that edits one site and can ask to see the pattern, which makes attention take its explicit path."""

    def __init__(self, inner: Tap, site: str, edit: Callable[[Tensor], Tensor], explicit: bool = False):
        self.inner, self.site, self.edit, self.explicit = inner, site, edit, explicit

    def __call__(self, site: str, value: Tensor) -> Tensor:
        return self.inner(site, self.edit(value) if site == self.site else value)

    def wants(self, site: str) -> bool:
        return self.explicit or self.inner.wants(site)


def _editing(site: str, edit: Callable[[Tensor], Tensor], explicit: bool = False) -> Callable[..., Tensor]:
    def attend(self, q, k, v, context, tap):
        return ATTEND(self, q, k, v, context, _Edit(tap, site, edit, explicit))

    return attend


def _next_head(q: Tensor) -> Tensor:
    return q.roll(1, dims=1)


def _swapping(method: Callable[..., Any]) -> Callable[..., Any]:
    """The matrices of q and k exchanged, where they have the same shape."""

    def swapped(self, *args, **named):
        if self.q.weight.shape != self.k.weight.shape:
            return method(self, *args, **named)
        self.q, self.k = self.k, self.q
        try:
            return method(self, *args, **named)
        finally:
            self.q, self.k = self.k, self.q

    return swapped


def _over_queries(q, k, v, scale, mask=None, is_causal=False, dropout=0.0, tap=None):
    sharing = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(sharing, dim=1), v.repeat_interleave(sharing, dim=1)
    scores = q @ k.transpose(-1, -2) * scale
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else scores + mask
    return scores.softmax(-2).nan_to_num(0.0) @ v  # a key that no query sees has an empty column


# positions

APPEND, ALIBI_BIAS, BUCKETS, WAVES = Cache.append, Alibi.bias, positions.t5_buckets, positions.sinusoids


def _one_further(self, new, positions=None, real=None):
    return APPEND(self, new, positions, real) + 1


def _one_further_when_cached(self, new, positions=None, real=None):
    ahead = 1 if self.length else 0
    return APPEND(self, new, positions, real) + ahead


def _turned_back(x: Tensor, rotation: Rotation) -> Tensor:
    return positions.apply_rotation(x, Rotation(rotation.cos, -rotation.sin, rotation.pairing))


def _queries_not_rotated(self, x, context=AttentionContext(), tap=NO_TAP, kv=None):
    placed = x if context.qk_embedding is None else x + context.qk_embedding
    kv = self.project_kv(x, placed, context.rotation) if kv is None else kv
    return FORWARD(self, x, dataclasses.replace(context, rotation=None), tap, kv)


def _distance_rewarded(self, queries, keys, dtype):
    return -ALIBI_BIAS(self, queries, keys, dtype)


def _other_direction(offset, spec, causal):
    return BUCKETS(-offset, spec, causal)


def _cosine_first(places, width, spec):
    """A quarter turn: cosines where sines belong, and sines negated where cosines do."""
    waves = WAVES(places, width, spec)
    if spec.layout == "halves":
        sines, cosines = waves.chunk(2, dim=-1)
        return torch.cat([cosines, -sines], -1)
    return torch.stack([waves[..., 1::2], -waves[..., 0::2]], -1).flatten(-2)


# feed-forward, norms, wiring

STACK_FORWARD, LAYER_NORM, RMS_NORM = Stack.forward, LayerNorm.forward, RMSNorm.forward


class _ExactGelu(SimpleNamespace):
    """torch.nn.functional with one function changed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(F, name)

    @staticmethod
    def gelu(x: Tensor, approximate: str = "none") -> Tensor:
        return F.gelu(x)


def _unbiased(self, x):
    centred = x - x.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(x.var(-1, keepdim=True) + self.eps) * self.weight
    return normed if self.bias is None else normed + self.bias


def _large_eps(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(self, x):
        before, self.eps = self.eps, 1000 * self.eps
        try:
            return method(self, x)
        finally:
            self.eps = before

    return forward


def _without_final_norm(self, *args, **named):
    norm, self.norm = self.norm, None
    try:
        return STACK_FORWARD(self, *args, **named)
    finally:
        self.norm = norm


MUTANTS: dict[str, Mutant] = {
    "mask_flipped": _mutant((Attention, "attend", _viewing(_flipped))),
    "mask_one_too_wide": _mutant((Attention, "attend", _viewing(_one_too_wide))),
    "padding_seen": _mutant((context, "padding", _all_are_real)),
    "scale_one_over_d": _mutant((Attention, "attend", _scaled(lambda width: 1 / width))),
    "no_scale": _mutant((Attention, "attend", _scaled(lambda width: 1.0))),
    "positions_shifted": _mutant((Cache, "append", _one_further)),
    "positions_shifted_when_cached": _mutant((Cache, "append", _one_further_when_cached)),
    "values_transposed": _mutant((Attention, "project_kv", _values_transposed)),
    "query_heads_rolled": _mutant((Attention, "attend", _editing("q", _next_head))),
    "queries_and_keys_swapped": _mutant((Attention, "forward", _swapping(FORWARD))),
    "softmax_over_queries": _mutant(
        (attention, "explicit_attention", _over_queries),
        (Attention, "attend", _editing("", lambda value: value, explicit=True)),
    ),
    "gelu_erf_for_tanh": _mutant((layers, "F", _ExactGelu())),
    "unbiased_variance": _mutant((LayerNorm, "forward", _unbiased)),
    "eps_times_1000": _mutant(
        (LayerNorm, "forward", _large_eps(LAYER_NORM)), (RMSNorm, "forward", _large_eps(RMS_NORM))
    ),
    "final_norm_missing": _mutant((Stack, "forward", _without_final_norm)),
    "post_for_pre_norm": _mutant((PreNormBlock, "forward", PostNormBlock.forward)),
    "rotary_sign": _mutant((attention, "apply_rotation", _turned_back)),
    "rotary_keys_only": _mutant((Attention, "forward", _queries_not_rotated)),
    "values_rotated": _mutant((Attention, "project_kv", _values_rotated)),
    "alibi_sign": _mutant((Alibi, "bias", _distance_rewarded)),
    "t5_direction": _mutant((positions, "t5_buckets", _other_direction)),
    "sinusoids_turned": _mutant((positions, "sinusoids", _cosine_first)),
}
