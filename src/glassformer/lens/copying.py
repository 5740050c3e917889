"""The OV circuit of a head: how attending to a token changes the logits, computed from the weights.

The OV circuit of head h is the V×V matrix

    OV_h = norm(W_E) W_V^T W_O,h^T W_U^T      (rows: the token attended to; columns: the logits)

where norm is the norm before the head, and the last norm's weight (and LayerNorm's centring) is folded into W_U. The
positive factor by which the last norm divides does not change the scores. Biases are left out, since they add the same
for every attended token. Positions and the outputs of earlier layers are left out too: after layer 0 this is one path
among several.

    copying_score  Σ λ / Σ |λ| over the eigenvalues of OV_h: 1 if attending to tokens raises their own logits, -1 if it
                   lowers them (Elhage et al. 2021, "detecting copying behaviour")
    copying_top    share of tokens whose own logit OV_h raises more than any other logit
                   (after the copying evaluator of Olsson et al. 2022)
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.lens.residual import stack_of
from glassformer.model import Model
from glassformer.model.layers import LayerNorm, RMSNorm
from glassformer.shapes import Float, Int


class Ends(NamedTuple):
    """The embedding and unembedding matrices that every OV circuit of a model shares."""

    embed: Float[Tensor, "V D"]
    """The input of the heads, without the norm's weight: standardised if the blocks have a norm before attention."""
    unembed: Float[Tensor, "V D"]
    """W_U with the last norm folded in."""


def copying_score(model: Model) -> Float[Tensor, "L H"] | None:
    """Return Σ λ / Σ |λ|, real, in [-1, 1]; NaN if OV_h is zero, None if the path to the logits is not linear.

    The V×V matrix is a product (V,U)(U,V), so its non-zero eigenvalues are those of the (U,U) product in the other
    order, W_O,h^T (W_U^T norm(W_E)) W_V^T. The inner (D,D) matrix is the same for all heads, up to the norm's weight.
    """
    ends = _ends(model)
    if ends is None:
        return None
    inner = (ends.unembed.T @ ends.embed).to(torch.float64)
    scores = []
    for layer in range(model.config.n_layers):
        values, outputs = (w.to(torch.float64) for w in _value_output(model, layer))
        eigenvalues = torch.linalg.eigvals(outputs.transpose(-1, -2) @ inner @ values)  # (H, U)
        scores.append(eigenvalues.real.sum(-1) / eigenvalues.abs().sum(-1))
    return torch.stack(scores)


def copying_top(model: Model, most: int = 512, seed: int = 0) -> Float[Tensor, "L H"] | None:
    """Return the share of tokens whose own logit rises most; a larger vocabulary is sampled to `most` tokens."""
    V = model.config.vocab_size
    sample = torch.randperm(V, generator=torch.Generator().manual_seed(seed))[:most]
    ends = _ends(model)
    if ends is None:
        return None
    shares = []
    for layer in range(model.config.n_layers):
        logits = _circuit(model, layer, Ends(ends.embed[sample], ends.unembed[sample]))
        own = logits.diagonal(dim1=-2, dim2=-1)
        others = logits.masked_fill(torch.eye(len(sample), dtype=torch.bool), float("-inf")).amax(-1)
        shares.append((own > others).to(torch.float64).mean(-1))
    return torch.stack(shares)


def ov_circuit(model: Model, layer: int, tokens: Int[Tensor, "N"] | None = None) -> Float[Tensor, "H N N"] | None:
    """Return OV_h of each head of a layer over `tokens` (default: all), or None if the logits are not linear in it."""
    ends = _ends(model)
    if ends is None:
        return None
    chosen = ends if tokens is None else Ends(ends.embed[tokens.cpu()], ends.unembed[tokens.cpu()])
    return _circuit(model, layer, chosen)


def _circuit(model: Model, layer: int, ends: Ends) -> Tensor:
    values, outputs = _value_output(model, layer)
    return (ends.embed @ values) @ (ends.unembed @ outputs).transpose(-1, -2)


@torch.no_grad()
def _value_output(model: Model, layer: int) -> tuple[Float[Tensor, "H D U"], Float[Tensor, "H D U"]]:
    """Return diag(norm's weight) W_V^T and W_O of each head, on the CPU."""
    cfg = model.config
    block: Any = stack_of(model).blocks[layer]
    values = block.attention.v.weight.unflatten(0, (cfg.n_kv_heads, cfg.d_value))  # (G, U, D)
    if cfg.placement != "post":
        values = values * (block.norm if cfg.placement == "parallel" else block.norm_attention).weight
    values = values.repeat_interleave(cfg.n_heads // cfg.n_kv_heads, dim=0).transpose(-1, -2)
    outputs = block.attention.o.weight.unflatten(1, (cfg.n_heads, cfg.d_value)).transpose(0, 1)  # (H, D, U)
    return _held(values), _held(outputs)


@torch.no_grad()
def _ends(model: Model) -> Ends | None:
    cfg, head = model.config, model.head
    stack: Any = stack_of(model)
    if head is None or head.transform is not None:
        return None
    x = model.embed(torch.arange(cfg.vocab_size, device=model.device)[None])[0]
    x = x if stack.embed_norm is None else stack.embed_norm(x)
    last = stack.norm
    if last is None:  # post-norm: the last norm of the last block
        last = stack.blocks[-1].norm_feedforward or stack.blocks[-1].norm_attention
    elif isinstance(last, LayerNorm):
        x = F.layer_norm(x, x.shape[-1:], eps=last.eps)
    else:
        x = F.rms_norm(x, x.shape[-1:], eps=last.eps)
    assert isinstance(last, LayerNorm | RMSNorm)
    table = (model.embed.tokens.weight if head.weight is None else head.weight) * last.weight * head.scale
    if isinstance(last, LayerNorm):
        table = table - table.mean(-1, keepdim=True)  # LayerNorm's centring, which is linear
    return Ends(_held(x), _held(table))


def _held(x: Tensor) -> Tensor:
    return x.detach().to("cpu", torch.promote_types(x.dtype, torch.float32))
