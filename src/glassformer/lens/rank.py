"""The rank of the residual stream by depth, and the rank-collapse experiment.

Pure attention makes the rows of its input equal at a cubic rate (Dong et al. 2021); skips, norms and feed-forwards slow
this down. `collapse` runs each variant, `collapse_exact` pure attention with many digits; both return the theoretical
rate with the measurement. `stream_rank` computes the same quantities for any model.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.errors import listing
from glassformer.lens.sites import LensError
from glassformer.lens.trace import Recorder, trace
from glassformer.model import Model
from glassformer.model.attention import explicit_attention
from glassformer.shapes import Float, Int

Variant = Literal["attention", "identity", "attention-mlp", "skip", "pre-norm-skip", "pre-norm-skip-mlp", "scaled-skip"]
VARIANTS: dict[Variant, str] = {
    "attention": "X ← A X W_V: pure attention, the theorem's case",
    "identity": "X ← X W_V: the control, attention masked to A = I, so tokens never mix",
    "attention-mlp": "X ← mlp(A X W_V): a feed-forward without a skip",
    "skip": "X ← X + A X W_V: a skip without a norm",
    "pre-norm-skip": "X ← X + attention(norm(X))",
    "pre-norm-skip-mlp": "X ← X + attention(norm(X)), X ← X + mlp(norm(X)): the usual block",
    "scaled-skip": "X ← X + A X W_V / √L",
}
ROUNDING = 1e-14
"""Deviations below this are float64 rounding: 32 equal rows of 64 numbers give 2e-16 to 5e-16."""


def singular_values(x: Float[Tensor, "*n T D"]) -> Float[Tensor, "*n R"]:
    """Return σ_1 ≥ σ_2 ≥ ... of each (T,D) matrix, in float64."""
    return torch.linalg.svdvals(x.detach().to(torch.float64))


def effective_rank(sigma: Float[Tensor, "*n R"]) -> Float[Tensor, "*n"]:
    """exp(-Σ p_i ln p_i), p_i = σ_i / Σ_j σ_j: 1 for rank one, R for R equal values (Roy and Vetterli 2007).

    The zero matrix has 0.
    """
    total = sigma.sum(-1, keepdim=True)
    p = sigma / total.clamp(min=torch.finfo(sigma.dtype).tiny)
    return torch.where(total[..., 0] > 0, torch.special.entr(p).sum(-1).exp(), 0.0)


def stable_rank(sigma: Float[Tensor, "*n R"]) -> Float[Tensor, "*n"]:
    """‖X‖_F² / ‖X‖_2² = Σ σ_i² / σ_1², at most the rank. The zero matrix has 0."""
    p = sigma / sigma[..., :1].clamp(min=torch.finfo(sigma.dtype).tiny)
    return p.square().sum(-1)


def deviation(x: Float[Tensor, "*n T D"]) -> Float[Tensor, "*n"]:
    """‖X - 1 m^T‖_F / ‖X‖_F with m the mean row: the relative distance to the nearest matrix of equal rows; in [0, 1].

    m is the nearest: ‖X - 1 c^T‖² = Σ_t ‖x_t - m + m - c‖² = Σ_t ‖x_t - m‖² + T ‖m - c‖², as the cross term
    2 (m - c) · Σ_t (x_t - m) is zero; the last term vanishes for c = m only. With c = 0 the same line gives
    ‖X‖² = ‖X - 1 m^T‖² + T ‖m‖², so the quotient is at most 1. A zero matrix has equal rows: 0.
    """
    x = x.detach().to(torch.float64)
    norm = torch.linalg.matrix_norm(x)
    away = torch.linalg.matrix_norm(x - x.mean(-2, keepdim=True))
    return torch.where(norm > 0, away / norm.clamp(min=torch.finfo(x.dtype).tiny), 0.0)


@dataclass(frozen=True)
class StreamRank:
    """Rank measures of the residual stream of a run, one entry per depth: the embedding and each block's output."""

    sites: tuple[str, ...]
    singular_values: Float[Tensor, "N B R"]
    effective_rank: Float[Tensor, "N B"]
    stable_rank: Float[Tensor, "N B"]
    deviation: Float[Tensor, "N B"]


def stream_rank(run: Mapping[str, Tensor], stack: str = "") -> StreamRank:
    """Compute the ranks from a trace with `embed` and every `blocks.I.resid_post`.

    `stack` is "encoder." or "decoder." for an encoder-decoder. Each sequence is one matrix (T,D), so sequences must not
    be padded: a padding position would count as a token.
    """
    sites = [f"{stack}embed"]
    while f"{stack}blocks.{len(sites) - 1}.resid_post" in run:
        sites.append(f"{stack}blocks.{len(sites) - 1}.resid_post")
    streams = torch.stack([run[site].detach().to("cpu", torch.float64) for site in sites])
    sigma = singular_values(streams)
    return StreamRank(tuple(sites), sigma, effective_rank(sigma), stable_rank(sigma), deviation(streams))


def rank_by_depth(model: Model, tokens: Int[Tensor, "B T"]) -> StreamRank:
    """Return `stream_rank` of one run of a decoder or an encoder."""
    return stream_rank(trace(model, tokens, sites=["embed", "blocks.*.resid_post"]))


@dataclass(frozen=True)
class AttentionSpectra:
    """Singular values of the matrices of one head. K bounds the rank of the scores, not the rank of the pattern."""

    scores: Float[Tensor, "R"]
    """scale · Q K^T: rank at most K."""
    pattern: Float[Tensor, "T"]
    """A = softmax(scores): may have full rank at K = 1."""
    log_pattern: Float[Tensor, "T"]
    """ln A, entry by entry: scores minus one number per row, so rank at most K + 1."""
    output: Float[Tensor, "R2"]
    """A V: rank at most min(T, U)."""


def attention_spectra(
    q: Float[Tensor, "T K"], k: Float[Tensor, "S K"], v: Float[Tensor, "S U"], scale: float | None = None
) -> AttentionSpectra:
    """Return the spectra of unmasked attention of one head; scale None means 1/√K."""
    seen = Recorder(("scores", "pattern"))
    q, k, v = (x.to(torch.float64)[None, None] for x in (q, k, v))
    out = explicit_attention(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, tap=seen)
    scores, pattern = seen.values["scores"][0, 0], seen.values["pattern"][0, 0]
    log_pattern = scores.log_softmax(-1)
    return AttentionSpectra(*(singular_values(x) for x in (scores, pattern, log_pattern, out[0, 0])))


@dataclass(frozen=True)
class Collapse:
    """One run of the experiment. Index l is the state after l layers; index 0 is the input."""

    variant: Variant
    singular_values: Float[Tensor, "L1 R"]
    ratio: Float[Tensor, "L1"]
    """σ_2 / σ_1. A small ratio does not imply equal rows: products of random W_V lower it too (see "identity")."""
    deviation: Float[Tensor, "L1"]
    effective_rank: Float[Tensor, "L1"]
    stable_rank: Float[Tensor, "L1"]
    bound: Float[Tensor, "L1"] | None
    """Pure attention: the cubic bound on `deviation`, given the state one layer before; NaN at index 0."""
    theory: Float[Tensor, "L1"] | None
    """A prediction from the input alone, for the two variants with a plain skip: see `predicted_deviation`."""


@dataclass(frozen=True)
class Layer:
    """One layer's weights: entries N(0, 1/D), the feed-forward D → 4D → D with relu and N(0, 2/D), N(0, 1/4D)."""

    q: Float[Tensor, "D D"]
    k: Float[Tensor, "D D"]
    v: Float[Tensor, "D D"]
    up: Float[Tensor, "D F"]
    down: Float[Tensor, "F D"]

    def attend(self, x: Float[Tensor, "T D"], mask: Tensor | None = None) -> Float[Tensor, "T D"]:
        """Return softmax(x W_Q (x W_K)^T / √D) x W_V, computed by the model's own function."""
        q, k, v = (torch.stack([x @ w])[None] for w in (self.q, self.k, self.v))
        return explicit_attention(q, k, v, x.shape[-1] ** -0.5, mask)[0, 0]

    def feed(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        return F.relu(x @ self.up) @ self.down


def draw(layers: int, n: int, d: int, seed: int) -> tuple[Float[Tensor, "T D"], list[Layer]]:
    """Draw the input, standard normal (n,d), and the weights; all variants of one seed share them."""
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int, variance: float) -> Tensor:
        return torch.randn(rows, columns, generator=generator, dtype=torch.float64) * math.sqrt(variance)

    x = normal(n, d, 1.0)
    shapes = [(d, d, 1 / d)] * 3 + [(d, 4 * d, 2 / d), (4 * d, d, 1 / (4 * d))]
    return x, [Layer(*(normal(*shape) for shape in shapes)) for _ in range(layers)]


@torch.no_grad()
def collapse(variant: Variant, layers: int = 50, n: int = 32, d: int = 64, seed: int = 0) -> Collapse:
    """Apply random layers of one variant (`VARIANTS`) to n random tokens of width d, in float64."""
    _check(variant, layers, n, d)
    x, weights = draw(layers, n, d, seed)
    states, bounds = [x], [math.nan]
    for layer in weights:
        states.append(_step(variant, states[-1], layer, layers))
        if variant == "attention":
            bounds.append(cubic_bound(states[-2], layer) / float(states[-1].norm()))
    stream = torch.stack(states)
    sigma = singular_values(stream)
    return Collapse(
        variant=variant,
        singular_values=sigma,
        ratio=sigma[:, 1] / sigma[:, 0],
        deviation=deviation(stream),
        effective_rank=effective_rank(sigma),
        stable_rank=stable_rank(sigma),
        bound=torch.tensor(bounds, dtype=torch.float64) if variant == "attention" else None,
        theory=predicted_deviation(variant, x, layers),
    )


def _step(variant: Variant, x: Tensor, layer: Layer, layers: int) -> Tensor:
    def norm(h: Tensor) -> Tensor:
        return F.layer_norm(h, h.shape[-1:])

    match variant:
        case "attention":
            return layer.attend(x)
        case "identity":
            return layer.attend(x, torch.eye(len(x), dtype=torch.bool))
        case "attention-mlp":
            return layer.feed(layer.attend(x))
        case "skip":
            return x + layer.attend(x)
        case "pre-norm-skip":
            return x + layer.attend(norm(x))
        case "pre-norm-skip-mlp":
            x = x + layer.attend(norm(x))
            return x + layer.feed(norm(x))
        case "scaled-skip":
            return x + layer.attend(x) / math.sqrt(layers)


def cubic_bound(x: Float[Tensor, "T D"], layer: Layer) -> float:
    """Upper bound on ‖X' - 1 mean^T‖_F for X' = A X W_V, cubic in the largest distance ρ of a row of X to their mean m.

    Write X = 1 m^T + R and W = W_Q W_K^T. Softmax drops what is constant along a row of the scores, so A is the softmax
    of 1 a^T + E with E = R W R^T / √D; without E all rows of A would be p = softmax(a). As (A - 1 p^T) 1 = 0,

        X' - 1 (p^T X W_V) = (A - 1 p^T) R W_V.

    Row i of A is p tilted by e^{E_i}, whose exponents spread by at most c = 2 ‖W‖_2 ρ² / √D, and a tilt by c moves at
    most tanh(c/4) of a distribution's mass. Hence each row of the right side is at most 2 tanh(c/4) ρ ‖W_V‖_2 long, and

        ‖X' - 1 mean^T‖_F ≤ √T · 2 tanh(‖W‖_2 ρ² / 2√D) · ρ ‖W_V‖_2 ≤ √(T/D) ‖W‖_2 ‖W_V‖_2 ρ³.

    The last is the cubic rate of Dong et al. 2021 (theorem 2.2), over L layers c^{(3^L - 1)/2} ρ^{3^L}: doubly
    exponential. Their norms and constant differ; this form needs no condition on the size of the scores.
    """
    rho = float((x - x.mean(0)).norm(dim=-1).max())
    score, value = (float(torch.linalg.matrix_norm(w, ord=2)) for w in (layer.q @ layer.k.T, layer.v))
    size, width = x.shape
    return math.sqrt(size) * 2 * math.tanh(score * rho**2 / (2 * math.sqrt(width))) * rho * value


def predicted_deviation(variant: Variant, x: Float[Tensor, "T D"], layers: int) -> Float[Tensor, "L1"] | None:
    """Predict the relative deviation after each layer from the input, to leading order; None if there is no formula.

    Once all rows attend alike, attention adds the same vector to every row: the deviation R stays constant and only the
    mean m changes. With random W_V the added vector is orthogonal to m on average, so the squared norms add.
      skip           it is m W_V, as long as m: T ‖m‖² doubles per layer and the deviation falls as 2^{-l/2}
      pre-norm-skip  it has length √D for every m: T ‖m‖² grows by T D per layer and the deviation falls as l^{-1/2}
    This does not hold while rows still attend differently, so early layers may deviate from the prediction.
    """
    mean_square = len(x) * float(x.mean(0).square().sum())
    spread_square = float((x - x.mean(0)).square().sum())
    depth = torch.arange(layers + 1, dtype=torch.float64)
    match variant:
        case "skip":
            grown = mean_square * 2**depth
        case "pre-norm-skip":
            grown = mean_square + x.numel() * depth
        case _:
            return None
    return (spread_square / (spread_square + grown)).sqrt()


@dataclass(frozen=True)
class ExactCollapse:
    """Pure attention with many digits, as base-10 logarithms: the values leave the range of float64 at layer 7."""

    digits: int
    log_deviation: list[float]
    """log10 of the relative deviation after l layers; index 0 is the input."""
    log_bound: list[float]
    """log10 of the cubic bound on it, given the state one layer before; NaN at index 0."""

    @property
    def ratios(self) -> list[float]:
        """Return log_deviation[l + 1] / log_deviation[l], which tends to 3."""
        return [b / a for a, b in zip(self.log_deviation, self.log_deviation[1:], strict=False)]


def collapse_exact(layers: int = 7, n: int = 6, d: int = 6, seed: int = 0, digits: int = 800) -> ExactCollapse:
    """Run the variant "attention" of `collapse` with the same draw in `digits`-digit arithmetic (mpmath).

    400 digits suffice for layer 7 of some draws only: others fall to 1e-600. A deviation that the digits cannot
    represent raises LensError.
    """
    import mpmath  # installed with sympy, imported only here

    def relative(x) -> float:  # type: ignore[no-untyped-def]  # mpmath has no types
        return float(mpmath.log10(mpmath.mnorm(_mp_centred(x), "f") / mpmath.mnorm(x, "f")))

    _check("attention", layers, n, d)
    start, weights = draw(layers, n, d, seed)
    with mpmath.workdps(digits):
        x = mpmath.matrix(start.tolist())
        logs, bounds = [relative(x)], [math.nan]
        for number, layer in enumerate(weights, 1):
            before, x = x, _mp_attend(x, layer)
            logs.append(relative(x))
            bounds.append(float(mpmath.log10(_mp_cubic_bound(before, layer) / mpmath.mnorm(x, "f"))))
            if logs[-1] < 20 - digits:
                raise LensError(
                    f"the deviation at layer {number} is 1e{logs[-1]:.0f}, which {digits} digits cannot tell from "
                    f"rounding: give digits={3 * digits} or fewer layers."
                )
    return ExactCollapse(digits, logs, bounds)


def _mp_attend(x, layer: Layer):  # type: ignore[no-untyped-def]
    import mpmath

    q, k, v = (x * mpmath.matrix(w.tolist()) for w in (layer.q, layer.k, layer.v))
    pattern = (q * k.T / mpmath.sqrt(x.cols)).apply(mpmath.exp)
    for i in range(x.rows):
        pattern[i, :] = pattern[i, :] / mpmath.fsum(pattern[i, :])
    return pattern * v


def _mp_centred(x):  # type: ignore[no-untyped-def]
    import mpmath

    mean = mpmath.ones(1, x.rows) * x / x.rows
    return x - mpmath.ones(x.rows, 1) * mean


def _mp_cubic_bound(x, layer: Layer):  # type: ignore[no-untyped-def]
    """Return `cubic_bound`; the spectral norms of the weights, of order one, are computed in float64 and rounded up."""
    import mpmath

    away = _mp_centred(x)
    rho = max(mpmath.norm(away[i, :]) for i in range(x.rows))
    score, value = (float(torch.linalg.matrix_norm(w, ord=2)) * (1 + 1e-12) for w in (layer.q @ layer.k.T, layer.v))
    return mpmath.sqrt(x.rows) * 2 * mpmath.tanh(score * rho**2 / (2 * mpmath.sqrt(x.cols))) * rho * value


def _check(variant: str, layers: int, n: int, d: int) -> None:
    if variant not in get_args(Variant):
        raise LensError(f"variant={variant!r} does not exist: use {listing(list(VARIANTS))}.")
    for name, value, least in (("layers", layers, 1), ("n", n, 2), ("d", d, 2)):
        if value < least:
            raise LensError(f"{name}={value} must be at least {least}: the experiment compares tokens over depth.")
