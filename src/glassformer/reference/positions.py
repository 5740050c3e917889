"""Position schemes: what order looks like to a Transformer.

Sinusoidal waves are added to the embedding, rotary waves turn queries and keys, ALiBi and T5 add to the scores. All of
them read position values (B,T), not indices.
"""

import math

import numpy as np

from glassformer.config import (
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    Rotary,
    Sinusoidal,
    T5Bias,
    YarnScaling,
)
from glassformer.reference.arrays import Array, Tokens


def sinusoidal(position: Sinusoidal, positions: Tokens, D: int) -> Array:
    """(B,T) -> (B,T,D): sin(p w_i) and cos(p w_i), w_i = base^(-2i/D), i = 0..D/2-1. Vaswani et al. 2017, 3.5.

    interleaved: sin at component 2i, cos at 2i+1 (the paper). halves: sines, then cosines (tensor2tensor, Marian).
    """
    frequencies = position.base ** (-2 * np.arange(D // 2) / D)
    angles = positions[..., None] * frequencies  # (B, T, D/2)
    waves = np.empty((*positions.shape, D))
    if position.layout == "interleaved":
        waves[..., 0::2], waves[..., 1::2] = np.sin(angles), np.cos(angles)
    else:
        waves[..., : D // 2], waves[..., D // 2 :] = np.sin(angles), np.cos(angles)
    return waves


def rotary_frequencies(rotary: Rotary, d_head: int) -> tuple[Array, float]:
    """Angle per position of each of the R/2 planes, and the factor on sines and cosines (1 except with YaRN).

    theta_i = base^(-2i/R), then stretched for a longer context:
    linear  theta_i / factor (Chen et al. 2023).
    ntk     base becomes base * factor^(R/(R-2)), which leaves theta_0 and divides the last theta by factor.
    """
    R = rotary.rotated(d_head)
    exponents = 2 * np.arange(R // 2) / R
    frequencies = rotary.base**-exponents
    match rotary.scaling:
        case None:
            return frequencies, 1.0
        case LinearScaling(factor=factor):
            return frequencies / factor, 1.0
        case NTKScaling(factor=factor):
            return (rotary.base * factor ** (R / (R - 2))) ** -exponents, 1.0
        case YarnScaling() as yarn:
            return _yarn(yarn, frequencies, rotary.base, R)
        case Llama3Scaling() as llama3:
            return _llama3(llama3, frequencies), 1.0


def _yarn(yarn: YarnScaling, frequencies: Array, base: float, R: int) -> tuple[Array, float]:
    """YaRN: keep fast planes, divide slow ones by `factor`, a linear ramp between. Peng et al. 2023, 3.2 to 3.4.

    The plane that makes t turns over the original context M has theta M = 2 pi t, hence index
    d(t) = R ln(M / (2 pi t)) / (2 ln base). The ramp goes from 0 at d(beta_fast) to 1 at d(beta_slow); its ends are
    rounded outwards when `truncate` and clipped to [0, R - 1]. Temperature 0.1 ln(factor) + 1 multiplies the waves.
    """

    def plane(turns: float) -> float:
        return R * math.log(yarn.original_max_len / (2 * math.pi * turns)) / (2 * math.log(base))

    low, high = plane(yarn.beta_fast), plane(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, R - 1)
    if low == high:
        high += 0.001  # the authors' guard against a ramp of width 0
    ramp = np.clip((np.arange(R // 2) - low) / (high - low), 0, 1)
    stretched = frequencies * (1 - ramp) + frequencies / yarn.factor * ramp
    temperature = 0.1 * math.log(yarn.factor) + 1 if yarn.attention_factor is None else yarn.attention_factor
    return stretched, temperature


def _llama3(scaling: Llama3Scaling, frequencies: Array) -> Array:
    """Llama 3.1: by wavelength 2 pi / theta. Above M/low: theta/factor. Below M/high: theta. Between, blended linearly
    in the number of turns M theta / (2 pi), which runs from low to high there."""
    out = np.empty_like(frequencies)
    for i, frequency in enumerate(frequencies):
        turns = scaling.original_max_len * frequency / (2 * math.pi)
        kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        kept = min(max(kept, 0.0), 1.0)
        out[i] = kept * frequency + (1 - kept) * frequency / scaling.factor
    return out


def rotary_waves(rotary: Rotary, d_head: int, positions: Tokens) -> tuple[Array, Array]:
    """cos and sin of the angle of every position and plane, (B,T,R/2) each, times YaRN's factor."""
    frequencies, factor = rotary_frequencies(rotary, d_head)
    angles = positions[..., None] * frequencies
    return factor * np.cos(angles), factor * np.sin(angles)


def rotate(rotary: Rotary, x: Array, cos: Array, sin: Array) -> Array:
    """Turn the first R components of every head, (B,H,T,K) -> (B,H,T,K): plane i goes (a, b) to
    (a cos - b sin, a sin + b cos). Su et al. 2021, 3.2.

    halves: plane i is components i and i + R/2 (NeoX, Llama). interleaved: 2i and 2i + 1 (the paper, GPT-J). The
    components from R on pass unchanged.
    """
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]  # (B, 1, T, R/2): the same for every head
    if rotary.pairing == "halves":
        first, second = slice(0, half), slice(half, 2 * half)
    else:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    a, b = x[..., first], x[..., second]
    out = x.copy()
    out[..., first] = a * cos - b * sin
    out[..., second] = a * sin + b * cos
    return out


def alibi_slopes(H: int) -> Array:
    """(H,): 2^(-8h/n) for h = 1..n when n = H is a power of two. Press et al. 2022, 3.

    Otherwise the slopes of the largest power of two below H, then every other slope (h = 1, 3, 5, ...) of twice that.
    """
    power = 2 ** math.floor(math.log2(H))
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    between = [2 ** (-8 * h / (2 * power)) for h in range(1, 2 * power + 1, 2)]
    return np.array((slopes + between)[:H])


def alibi_bias(positions: Tokens, H: int) -> Array:
    """(B,H,T,T): -slope_h |p_i - p_j|, added to the scores of query i and key j."""
    distance = np.abs(positions[:, :, None] - positions[:, None, :])  # (B, T, T)
    return -alibi_slopes(H)[None, :, None, None] * distance[:, None]


def t5_bucket(relative: int, position: T5Bias, bidirectional: bool) -> int:
    """Bucket of one offset, key position - query position. Raffel et al. 2020, 2.1.

    Bidirectional: the lower half of the buckets for keys at or before the query, the upper half for keys after it.
    Unidirectional: all for the past; an offset into the future counts as 0. Of the n buckets of a direction the first
    e = n/2 hold one distance each, and distance d >= e goes to e + floor((n - e) ln(d/e) / ln(max_distance/e)), at
    most n - 1. The floor is found in whole numbers: the largest j with (max_distance/e)^j <= (d/e)^(n-e), so no
    rounding of a logarithm can move a distance that lies on a border.
    """
    n, first = position.buckets, 0
    if bidirectional:
        n //= 2
        first = n if relative > 0 else 0
        distance = abs(relative)
    else:
        distance = max(-relative, 0)
    exact = n // 2
    if distance < exact:
        return first + distance
    steps = n - exact
    step = 0
    while step < steps - 1 and position.max_distance ** (step + 1) * exact**steps <= distance**steps * exact ** (
        step + 1
    ):
        step += 1
    return first + exact + step


def t5_buckets(position: T5Bias, positions: Tokens, bidirectional: bool) -> Tokens:
    """(B,T) -> (B,T,T): the bucket of every pair of query (rows) and key."""
    relative = positions[:, None, :] - positions[:, :, None]
    buckets = np.empty_like(relative)
    for offset in np.unique(relative):
        buckets[relative == offset] = t5_bucket(int(offset), position, bidirectional)
    return buckets


def t5_bias(table: Array, buckets: Tokens) -> Array:
    """(buckets, H) and (B,T,T) -> (B,H,T,T): the trained number of each pair's bucket, added to the scores."""
    return np.moveaxis(table[buckets], -1, 1)
