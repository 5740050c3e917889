"""One attention layer of the engine with given matrices, and everything it says on the way.

Matrices are in the convention of the claims: tokens are rows and W is (in, out), so that Q = X W. The engine stores
(out, in); `layer` transposes once, here.
"""

import torch
from torch import Tensor

from glassformer import config as c
from glassformer.model.attention import Attention
from glassformer.model.context import NO_TAP, AttentionContext
from glassformer.shapes import Bool, Float
from glassformer.theory.claims.small_models import one_layer


class Notes(dict[str, Tensor]):
    """A tap that keeps every site, and so sends attention along its explicit path."""

    def __call__(self, site: str, value: Tensor) -> Tensor:
        self[site] = value
        return value

    def wants(self, site: str) -> bool:
        return True


@torch.no_grad()
def layer(
    q: Float[Tensor, "D HK"],
    k: Float[Tensor, "D HK"],
    v: Float[Tensor, "D HU"],
    o: Float[Tensor, "HU D"],
    n_heads: int = 1,
    scale: float | None = None,
) -> Attention:
    """The engine's attention without biases: Concat_h[softmax(scale X Wq (X Wk)^T) X Wv] Wo, scale 1/sqrt(K)."""
    attention = Attention(shape(len(q), n_heads, q.shape[1] // n_heads, v.shape[1] // n_heads, scale)).to(q.dtype)
    for projection, matrix in ((attention.q, q), (attention.k, k), (attention.v, v), (attention.o, o)):
        projection.weight.copy_(matrix.T)
    return attention.eval()


def shape(d_model: int, n_heads: int, d_head: int, d_value: int, scale: float | None = None) -> c.EncoderConfig:
    """The config of a model that is one attention layer without biases, positions, feed-forward and head."""
    return one_layer(
        c.EncoderConfig,
        vocab_size=1,
        d_model=d_model,
        attention=c.Attention(n_heads=n_heads, d_head=d_head, d_value=d_value, scale=scale, bias=False),
        head=None,
    )


def random_layer(
    generator: torch.Generator, d_model: int, n_heads: int, d_head: int, d_value: int, scale: float | None = None
) -> Attention:
    """A layer whose matrices have entries N(0, 1/D), in float64."""
    keys, values = n_heads * d_head, n_heads * d_value
    q, k, v = (normal(generator, d_model, width) * d_model**-0.5 for width in (keys, keys, values))
    o = normal(generator, values, d_model) * d_model**-0.5
    return layer(q, k, v, o, n_heads, scale)


def normal(generator: torch.Generator, *size: int) -> Tensor:
    """Independent standard normal numbers, float64."""
    return torch.randn(*size, generator=generator, dtype=torch.float64)


def identity(d_model: int, scale: float | None = None) -> Attention:
    """One head whose four matrices are the identity: y_n = sum_m softmax_m(scale x_n . x_m) x_m."""
    eye = torch.eye(d_model, dtype=torch.float64)
    return layer(eye, eye, eye, eye, scale=scale)


@torch.no_grad()
def run(
    attention: Attention,
    x: Float[Tensor, "T D"],
    causal: bool = False,
    bias: Float[Tensor, "H T S"] | None = None,
) -> Notes:
    """One sequence through the layer; the sites are `q`, `k`, `v`, `scores`, `pattern`, `heads` and `out`."""
    notes = Notes()
    mask = None if bias is None else bias[None]
    if mask is not None and causal:
        mask = mask.masked_fill(torch.ones(mask.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    attention(x[None], AttentionContext(mask, is_causal=causal and mask is None), notes)
    return Notes({site: value[0] for site, value in notes.items()})


@torch.no_grad()
def softmax_of(
    scores: Float[Tensor, "T S"], mask: Bool[Tensor, "T S"] | None = None, fused: bool = False
) -> Float[Tensor, "T S"]:
    """The weights the engine makes of given scores.

    The scores are the queries, keys and values are unit vectors and the scale is 1, so that q k^T is the scores without
    rounding and the output is the pattern. `fused` takes torch's kernel instead of the explicit path.
    """
    eye = torch.eye(scores.shape[1], dtype=scores.dtype)
    attention = layer(eye, eye, eye, eye, scale=1.0)
    keys = eye[None, None]
    context = AttentionContext(None if mask is None else mask[None, None])
    notes = Notes()
    out = attention(scores[None], context, NO_TAP if fused else notes, (keys, keys))
    return out[0] if fused else notes["pattern"][0, 0]
