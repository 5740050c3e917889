"""Position schemes: what is added to the embedding, how queries and keys are rotated, what biases the scores.

Every scheme has the same four methods (`add`, `qk_embedding`, `rotation`, `bias`). Those that do not concern it do
nothing, so attention and blocks never ask which scheme is in use.
"""

import math
from typing import NamedTuple, assert_never

import torch
from torch import Tensor, nn

from glassformer import config as c
from glassformer.shapes import Float, Int

TABLE_LIMIT = 2**17
"""Positions beyond this are computed directly: a rare large position must not fill the memory with a table."""


class Rotation(NamedTuple):
    """Cosines and sines of the T new tokens, R/2 of each; R components of a head are rotated."""

    cos: Float[Tensor, "#B 1 T P"]
    sin: Float[Tensor, "#B 1 T P"]
    pairing: str


class NoPosition(nn.Module):
    """No positions at all; the base class of the other schemes, each of which overrides what it does."""

    has_bias = False
    """Whether `bias` returns anything."""

    def add(self, x: Float[Tensor, "B T D"], positions: Int[Tensor, "#B T"]) -> Float[Tensor, "B T D"]:
        return x

    def qk_embedding(self, positions: Int[Tensor, "#B T"], dtype: torch.dtype) -> Float[Tensor, "#B T D"] | None:
        """Position embedding that is added to the input of queries and keys in every block."""
        return None

    def rotation(self, positions: Int[Tensor, "#B T"], dtype: torch.dtype, last: int | None) -> Rotation | None:
        """Cosines and sines for these positions. `last` is an upper bound on them, where one is known."""
        return None

    def bias(
        self, queries: Int[Tensor, "#B T"], keys: Int[Tensor, "#B S"], dtype: torch.dtype
    ) -> Float[Tensor, "#B H T S"] | None:
        """What is added to the scores, for queries and keys at these positions."""
        return None


class Learned(NoPosition):
    """x + table[position + offset]."""

    def __init__(self, rows: int, d_model: int, offset: int):
        super().__init__()
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(rows, d_model))

    def add(self, x: Float[Tensor, "B T D"], positions: Int[Tensor, "#B T"]) -> Float[Tensor, "B T D"]:
        return x + self.vectors(positions)

    def vectors(self, positions: Int[Tensor, "#B T"]) -> Float[Tensor, "#B T D"]:
        return nn.functional.embedding(positions + self.offset, self.weight)


class Sinusoidal(NoPosition):
    """x + waves(position). Angles are computed in float64: in float32 position 10,000 is off by 1e-3 radians."""

    def __init__(self, spec: c.Sinusoidal):
        super().__init__()
        self.spec = spec

    def add(self, x: Float[Tensor, "B T D"], positions: Int[Tensor, "#B T"]) -> Float[Tensor, "B T D"]:
        return x + sinusoids(positions, x.shape[-1], self.spec).to(x.dtype)


class LearnedQueryKey(Learned):
    """A learned table that is not added to the residual stream, but to the input of queries and keys."""

    def add(self, x: Float[Tensor, "B T D"], positions: Int[Tensor, "#B T"]) -> Float[Tensor, "B T D"]:
        return x

    def qk_embedding(self, positions: Int[Tensor, "#B T"], dtype: torch.dtype) -> Float[Tensor, "#B T D"] | None:
        return self.vectors(positions).to(dtype)


class SinusoidalQueryKey(NoPosition):
    """Sinusoids that are added to the input of queries and keys."""

    def __init__(self, spec: c.Sinusoidal, d_model: int):
        super().__init__()
        self.spec, self.d_model = spec, d_model

    def qk_embedding(self, positions: Int[Tensor, "#B T"], dtype: torch.dtype) -> Float[Tensor, "#B T D"] | None:
        return sinusoids(positions, self.d_model, self.spec).to(dtype)


Waves = tuple[Tensor, Tensor]
"""Cosines and sines."""


class Rotary(NoPosition):
    """Rotates each pair (a, b) of q and k to (a cos - b sin, a sin + b cos) by its angle position * frequency.

    Cosines and sines are looked up in a table that is computed once: a compiler would otherwise repeat the computation,
    in float64, for every head of every layer.
    """

    def __init__(self, spec: c.Rotary, d_head: int):
        super().__init__()
        self.spec, self.d_rotated = spec, spec.rotated(d_head)
        self.tables: dict[tuple[torch.device, torch.dtype, bool, int], tuple[Tensor, Tensor]] = {}
        """By number of rows, a power of two. Short ones are kept: a captured CUDA graph reads them by their address."""

    def rotation(self, positions: Int[Tensor, "#B T"], dtype: torch.dtype, last: int | None) -> Rotation | None:
        cos, sin = self._waves(positions, dtype, last, is_long=False)
        scaling = self.spec.scaling
        if isinstance(scaling, c.LongScaling) and (last is None or last >= scaling.original_max_len):
            is_long = (positions.amax(-1) >= scaling.original_max_len)[:, None, None, None]
            of_long = self._waves(positions, dtype, last, is_long=True)
            cos, sin = torch.where(is_long, of_long[0], cos), torch.where(is_long, of_long[1], sin)
        return Rotation(cos, sin, self.spec.pairing)

    def _waves(self, positions: Int[Tensor, "#B T"], dtype: torch.dtype, last: int | None, is_long: bool) -> Waves:
        """Cosines and sines (B, 1, T, R/2), looked up where a bound on the positions is known."""
        if last is None or last >= TABLE_LIMIT:
            return self.table(positions[:, None], dtype, is_long)
        rows = 2 ** (max(last, 1023)).bit_length()
        key = (positions.device, dtype, is_long, rows)
        if key not in self.tables:
            self.tables[key] = self.table(torch.arange(rows, device=positions.device), dtype, is_long)
        cos, sin = self.tables[key]
        return cos[positions][:, None], sin[positions][:, None]

    def table(self, positions: Int[Tensor, "*n"], dtype: torch.dtype, is_long: bool = False) -> Waves:
        frequencies, factor = rotary_frequencies(self.spec, self.d_rotated, positions.device, is_long)
        angles = positions[..., None].to(torch.float64) * frequencies
        return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


class Alibi(NoPosition):
    """-slope_h * |query position - key position| on the scores: a linear penalty on distance, one slope per head."""

    has_bias = True

    def __init__(self, n_heads: int, spec: c.Alibi = c.Alibi()):
        super().__init__()
        self.n_heads, self.spec = n_heads, spec
        self.slopes: dict[torch.device, Tensor] = {}

    def bias(
        self, queries: Int[Tensor, "#B T"], keys: Int[Tensor, "#B S"], dtype: torch.dtype
    ) -> Float[Tensor, "#B H T S"] | None:
        if keys.device not in self.slopes:
            self.slopes[keys.device] = torch.tensor(alibi_slopes(self.n_heads), dtype=torch.float64, device=keys.device)
        slopes = self.spec.scale * self.slopes[keys.device][:, None, None]  # (H, 1, 1)
        if self.spec.rounded:
            q, k = (self._rounded(positions) for positions in (queries, keys))  # (B, H, T), (B, H, S)
            return (-self.spec.scale * (q[..., None] - k[:, :, None]).abs()).to(dtype)
        distance = (queries[:, :, None] - keys[:, None, :]).abs()  # (B, T, S)
        return (-slopes * distance[:, None]).to(dtype)

    def _rounded(self, positions: Int[Tensor, "#B T"]) -> Float[Tensor, "#B H T"]:
        """slope_h * position, each factor and the result rounded to bfloat16."""
        slopes = self.slopes[positions.device].to(torch.bfloat16)[:, None]
        return (slopes * positions[:, None].to(torch.bfloat16)).to(torch.float64)


class T5Bias(NoPosition):
    """table[bucket(key position - query position), head] on the scores."""

    has_bias = True

    def __init__(self, spec: c.T5Bias, n_heads: int, causal: bool):
        super().__init__()
        self.spec, self.causal = spec, causal
        self.weight = nn.Parameter(torch.empty(spec.buckets, n_heads))

    def bias(
        self, queries: Int[Tensor, "#B T"], keys: Int[Tensor, "#B S"], dtype: torch.dtype
    ) -> Float[Tensor, "#B H T S"] | None:
        buckets = t5_buckets(keys[:, None, :] - queries[:, :, None], self.spec, self.causal)  # (B, T, S)
        return nn.functional.embedding(buckets, self.weight).permute(0, 3, 1, 2).to(dtype)


def build_position(spec: c.Position, cfg: c.ModelConfig, causal: bool) -> NoPosition:
    match spec:
        case c.NoPosition():
            return NoPosition()
        case c.Learned(offset=offset):
            assert cfg.max_len is not None  # validated by the config
            return Learned(cfg.max_len + offset, cfg.position_width, offset)
        case c.Sinusoidal():
            return Sinusoidal(spec)
        case c.Rotary():
            return Rotary(spec, cfg.d_head)
        case c.Alibi():
            return Alibi(cfg.n_heads, spec)
        case c.T5Bias():
            return T5Bias(spec, cfg.n_heads, causal)
        case c.QueryKeyPosition(vectors=vectors):
            if isinstance(vectors, c.Sinusoidal):
                return SinusoidalQueryKey(vectors, cfg.d_model)
            assert cfg.max_len is not None
            return LearnedQueryKey(cfg.max_len + vectors.offset, cfg.d_model, vectors.offset)
        case _:
            assert_never(spec)


def sinusoids(positions: Int[Tensor, "*n"], width: int, spec: c.Sinusoidal) -> Float[Tensor, "*n W"]:
    """sin and cos of (position + offset) * base^(-2i/width), spaced and laid out as the config says; float64."""
    half = torch.arange(width // 2, dtype=torch.float64, device=positions.device)
    exponent = 2 * half / width if spec.spacing == "exclusive" else half / (width // 2 - 1)
    angles = (positions[..., None] + spec.offset).to(torch.float64) * spec.base**-exponent
    waves = torch.stack([angles.sin(), angles.cos()], dim=-1 if spec.layout == "interleaved" else -2)
    return waves.flatten(-2)


def rotary_frequencies(
    spec: c.Rotary, rotated: int, device: torch.device, is_long: bool = False
) -> tuple[Float[Tensor, "P"], float]:
    """Radians per position of each of the R/2 pairs (float64), and the factor on cosines and sines.

    `is_long` is for LongScaling alone: the sequence is longer than the original context.
    """
    pair = torch.arange(0, rotated, 2, dtype=torch.float64, device=device)
    frequencies = spec.base ** (-pair / rotated)
    match spec.scaling:
        case None:
            return frequencies, 1.0
        case c.LinearScaling(factor=factor):
            return frequencies / factor, 1.0
        case c.NTKScaling(factor=factor):
            base = spec.base * factor ** (rotated / (rotated - 2))
            return base ** (-pair / rotated), 1.0
        case c.YarnScaling():
            return _yarn(frequencies, spec.base, rotated, spec.scaling)
        case c.Llama3Scaling():
            return _llama3(frequencies, spec.scaling), 1.0
        case c.LongScaling() as s:
            divisors = torch.tensor(s.long if is_long else s.short, dtype=torch.float64, device=device)
            return frequencies / divisors, s.attention_factor
        case _:
            assert_never(spec.scaling)


def _yarn(frequencies: Tensor, base: float, rotated: int, s: c.YarnScaling) -> tuple[Tensor, float]:
    def pair_rotating(times: float) -> float:
        """The (fractional) pair that makes `times` full rotations over the original context."""
        return rotated * math.log(s.original_max_len / (times * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_rotating(s.beta_fast), pair_rotating(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    pair = torch.arange(len(frequencies), dtype=torch.float64, device=frequencies.device)
    slow = ((pair - low) / max(high - low, 0.001)).clamp(0, 1)  # 0: keep the frequency, 1: interpolate it
    factor = s.attention_factor if s.attention_factor is not None else 0.1 * math.log(s.factor) + 1
    return frequencies / s.factor * slow + frequencies * (1 - slow), factor


def _llama3(frequencies: Tensor, s: c.Llama3Scaling) -> Tensor:
    turns = s.original_max_len * frequencies / (2 * math.pi)  # full rotations over the original context
    keep = ((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / s.factor)


def apply_rotation(x: Float[Tensor, "B N T K"], rotation: Rotation) -> Float[Tensor, "B N T K"]:
    """Rotate the first R components of every head; the rest pass through."""
    # in x's own dtype: under autocast the stream is float32 and queries are not, and should stay so
    cos, sin = rotation.cos.to(x.dtype), rotation.sin.to(x.dtype)
    rotated = 2 * cos.shape[-1]
    to_rotate, rest = x[..., :rotated], x[..., rotated:]
    if rotation.pairing == "halves":
        a, b = to_rotate.chunk(2, dim=-1)
    else:
        a, b = to_rotate[..., 0::2], to_rotate[..., 1::2]
    parts = [a * cos - b * sin, a * sin + b * cos]
    if rotation.pairing == "halves":
        return torch.cat([*parts, rest], dim=-1)
    return torch.cat([torch.stack(parts, dim=-1).flatten(-2), rest], dim=-1)


def alibi_slopes(n_heads: int) -> list[float]:
    """One slope per head. For other head counts than powers of two, the rest is every other slope of the next power."""
    power = 2 ** int(math.log2(n_heads))
    slopes = [2.0 ** (-8 * h / power) for h in range(1, power + 1)]
    borrowed = [2.0 ** (-8 * h / (2 * power)) for h in range(1, 2 * (n_heads - power), 2)]
    return slopes + borrowed


def t5_buckets(offset: Int[Tensor, "*n"], spec: c.T5Bias, causal: bool) -> Int[Tensor, "*n"]:
    """Bucket of each offset (key - query): exact near zero, logarithmic up to max_distance, the last one beyond.

    The logarithm is taken in float32 as in the released models: at a bucket's edge another precision rounds elsewhere.
    """
    if causal:
        buckets, start, distance = spec.buckets, torch.zeros_like(offset), (-offset).clamp(min=0)
    else:
        buckets, start, distance = spec.buckets // 2, (offset > 0) * (spec.buckets // 2), offset.abs()
    exact = buckets // 2
    ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(spec.max_distance / exact)
    far = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
    return start + torch.where(distance < exact, distance, far)
