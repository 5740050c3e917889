"""Position schemes: sinusoidal, rotary, ALiBi and T5.

Sinusoids are added to the embedding, rotary positions rotate queries and keys, ALiBi and T5 add a bias to the scores.
All of them are functions of the position ids (B,T), not of the index in the sequence (see `masks`).
"""

import math

import numpy as np

from glassformer.config import (
    Alibi,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    NTKScaling,
    Rotary,
    Sinusoidal,
    T5Bias,
    YarnScaling,
)
from glassformer.reference.arrays import Array, Tokens


def sinusoidal(position: Sinusoidal, positions: Tokens, D: int) -> Array:
    """Return the sinusoidal position embedding: position ids (B,T) -> (B,T,D).

        sin(p w_i) and cos(p w_i),   w_i = base^(-2i/D),   i = 0..D/2-1

    With `inclusive` spacing w_i = base^(-i/(D/2 - 1)), so that the last frequency is 1/base. p counts from `offset`.
    Layout `interleaved`: sin at component 2i, cos at 2i+1 (the paper). Layout `halves`: all sines, then all cosines
    (tensor2tensor, Marian). Vaswani et al. 2017, section 3.5.
    """
    waves = np.arange(D // 2)
    frequencies = position.base ** (-2 * waves / D)
    if position.spacing == "inclusive":
        frequencies = position.base ** (-waves / (D / 2 - 1))
    angles = (positions[..., None] + position.offset) * frequencies  # (B, T, D/2)
    embedding = np.empty((*positions.shape, D))
    if position.layout == "interleaved":
        embedding[..., 0::2], embedding[..., 1::2] = np.sin(angles), np.cos(angles)
    else:
        embedding[..., : D // 2], embedding[..., D // 2 :] = np.sin(angles), np.cos(angles)
    return embedding


def rotary_frequencies(rotary: Rotary, d_head: int, is_long: bool = False) -> tuple[Array, float]:
    """Return the rotary frequencies (R/2,), in radians per position, and the factor on cos and sin.

        theta_i = base^(-2i/R),   i = 0..R/2-1

    R is the number of rotated components of a head, so there are R/2 planes. Scaling for longer contexts:

        linear   theta_i / factor (Chen et al. 2023)
        ntk      base is replaced by base * factor^(R/(R-2)): theta_0 is unchanged, the last theta is divided by factor
        yarn     see `_yarn`
        llama3   see `_llama3`
        long     theta_i / short_i, or theta_i / long_i if the sequence is longer than the original context (`is_long`)

    The factor is 1 except with YaRN and `long`.
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
        case LongScaling() as s:
            return frequencies / np.array(s.long if is_long else s.short), s.attention_factor


def _yarn(yarn: YarnScaling, frequencies: Array, base: float, R: int) -> tuple[Array, float]:
    """Return the frequencies and the factor on cos and sin with YaRN scaling. Peng et al. 2023, sections 3.2 to 3.4.

    High frequencies are kept, low frequencies are divided by `factor`, and a linear ramp interpolates between them. A
    plane that makes t rotations over the original context M has theta M = 2 pi t, hence the index

        d(t) = R ln(M / (2 pi t)) / (2 ln base)

    The ramp rises from 0 at d(beta_fast) to 1 at d(beta_slow). Its ends are rounded outwards with `truncate`, and
    clipped to [0, R - 1]. The factor on cos and sin is 0.1 ln(factor) + 1 unless `attention_factor` is given.
    """

    def plane(rotations: float) -> float:
        return R * math.log(yarn.original_max_len / (2 * math.pi * rotations)) / (2 * math.log(base))

    low, high = plane(yarn.beta_fast), plane(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, R - 1)
    if low == high:
        high += 0.001  # avoids a ramp of width 0, with the value of the authors' code
    ramp = np.clip((np.arange(R // 2) - low) / (high - low), 0, 1)
    scaled = frequencies * (1 - ramp) + frequencies / yarn.factor * ramp
    attention_factor = 0.1 * math.log(yarn.factor) + 1 if yarn.attention_factor is None else yarn.attention_factor
    return scaled, attention_factor


def _llama3(scaling: Llama3Scaling, frequencies: Array) -> Array:
    """Return the frequencies with Llama 3.1 scaling, by the number of rotations r = M theta / (2 pi) over context M.

    r >= high_freq_factor   theta
    r <= low_freq_factor    theta / factor
    between                 linear interpolation of the two in r
    """
    out = np.empty_like(frequencies)
    for i, frequency in enumerate(frequencies):
        rotations = scaling.original_max_len * frequency / (2 * math.pi)
        kept = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        kept = min(max(kept, 0.0), 1.0)
        out[i] = kept * frequency + (1 - kept) * frequency / scaling.factor
    return out


def rotary_cos_sin(rotary: Rotary, d_head: int, positions: Tokens) -> tuple[Array, Array]:
    """Return cos and sin of the angle p theta_i for position p and plane i, (B,T,R/2) each, times the factor."""
    frequencies, factor = rotary_frequencies(rotary, d_head)
    angles = positions[..., None] * frequencies
    if isinstance(rotary.scaling, LongScaling):
        is_long = positions.max(axis=-1) >= rotary.scaling.original_max_len
        angles[is_long] = positions[is_long][..., None] * rotary_frequencies(rotary, d_head, is_long=True)[0]
    return factor * np.cos(angles), factor * np.sin(angles)


def rotate(rotary: Rotary, x: Array, cos: Array, sin: Array) -> Array:
    """Rotate the first R components of every head: (B,H,T,K) -> (B,H,T,K).

        (a, b) -> (a cos - b sin, a sin + b cos)   in each plane i

    Pairing `halves`: plane i consists of components i and i + R/2 (GPT-NeoX, Llama). Pairing `interleaved`: components
    2i and 2i + 1 (the paper, GPT-J). Components from R on are unchanged. Su et al. 2021, section 3.2.
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
    """Return the ALiBi slopes (H,): 2^(-8h/H) for h = 1..H if H is a power of two.

    Otherwise: all slopes for n, the largest power of two below H, then every second slope (h = 1, 3, 5, ...) for 2n.
    Press et al. 2022, section 3.
    """
    power = 2 ** math.floor(math.log2(H))
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    between = [2 ** (-8 * h / (2 * power)) for h in range(1, 2 * power + 1, 2)]
    return np.array((slopes + between)[:H])


def alibi_bias(alibi: Alibi, positions: Tokens, H: int) -> Array:
    """Return the ALiBi bias (B,H,T,T): -scale slope_h |p_i - p_j| for query i and key j.

    With `rounded` it is -scale |r(p_i) - r(p_j)|, where r(p) is slope_h p and slope, p and r are rounded to bfloat16.
    """
    slopes = alibi_slopes(H)[None, :, None]
    if alibi.rounded:
        places = bfloat16(bfloat16(slopes) * bfloat16(positions[:, None].astype(np.float64)))  # (B, H, T)
    else:
        places = slopes * positions[:, None]
    return -alibi.scale * np.abs(places[..., :, None] - places[..., None, :])


def bfloat16(x: Array) -> Array:
    """Round to bfloat16, which keeps 8 significant bits: to the nearest value, ties to an even last bit."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(mantissa * 256) / 256, exponent)


def t5_bucket(relative: int, position: T5Bias, bidirectional: bool) -> int:
    """Return the T5 bucket of one offset, `relative` = key position - query position.

    Bidirectional: the lower half of the buckets is for keys at or before the query, the upper half for keys after it.
    Unidirectional: all buckets are for keys at or before the query; a later key counts as distance 0. Let n be the
    number of buckets of one direction and e = n/2:

        d < e    bucket d: one bucket per distance
        d >= e   bucket e + floor((n - e) ln(d/e) / ln(max_distance/e)), at most n - 1

    The floor is computed in integers, as the largest j with (max_distance/e)^j <= (d/e)^(n-e). A rounded logarithm
    could put a distance at the edge of a bucket into the wrong one. Raffel et al. 2020, section 2.1.
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
    """Return the bucket of every pair of query (axis 1) and key (axis 2): (B,T) -> (B,T,T)."""
    relative = positions[:, None, :] - positions[:, :, None]
    buckets = np.empty_like(relative)
    for offset in np.unique(relative):
        buckets[relative == offset] = t5_bucket(int(offset), position, bidirectional)
    return buckets


def t5_bias(table: Array, buckets: Tokens) -> Array:
    """Return the T5 bias (B,H,T,T): table[bucket of (i,j), h], from the table (buckets, H) and the buckets (B,T,T)."""
    return np.moveaxis(table[buckets], -1, 1)
