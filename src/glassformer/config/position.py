"""Position schemes: one small type each, and the four scalings of the rotary one."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from glassformer.config.errors import require, require_choice, require_positive


@dataclass(frozen=True)
class NoPosition:
    """No position information at all: order is visible only through the causal mask, if there is one."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True)
class Learned:
    """A trained table with max_len + offset rows; position p reads row p + offset (RoBERTa's offset is 2)."""

    kind: ClassVar[str] = "learned"
    offset: int = 0

    def __post_init__(self) -> None:
        require(self.offset >= 0, f"Learned.offset={self.offset} must be 0 or more: it skips rows of the table.")


@dataclass(frozen=True)
class Sinusoidal:
    """Fixed waves sin(p w_i), cos(p w_i), w_i = base^(-2i/D), added to the embedding. Vaswani et al. 2017, 3.5.

    `interleaved` puts sin at component 2i and cos at 2i+1 (the paper); `halves` puts all sines first (tensor2tensor).
    """

    kind: ClassVar[str] = "sinusoidal"
    base: float = 10000.0
    layout: Literal["interleaved", "halves"] = "interleaved"

    def __post_init__(self) -> None:
        require(self.base > 1, f"Sinusoidal.base={self.base} must exceed 1.")
        require_choice(self, "layout", Literal["interleaved", "halves"])


@dataclass(frozen=True)
class LinearScaling:
    """Every frequency divided by `factor`: positions are interpolated. Chen et al. 2023."""

    kind: ClassVar[str] = "linear"
    factor: float

    def __post_init__(self) -> None:
        require(self.factor >= 1, f"LinearScaling.factor={self.factor} must be at least 1.")


@dataclass(frozen=True)
class NTKScaling:
    """The base multiplied by factor^(R/(R-2)): high frequencies stay, the lowest is divided by `factor`."""

    kind: ClassVar[str] = "ntk"
    factor: float

    def __post_init__(self) -> None:
        require(self.factor >= 1, f"NTKScaling.factor={self.factor} must be at least 1.")


@dataclass(frozen=True)
class YarnScaling:
    """Low frequencies interpolated, high ones kept, a linear ramp between. Peng et al. 2023, 3.2 to 3.4.

    With original context M and R rotated components, the pair that turns `t` times over M has index
    d(t) = R ln(M / (2 pi t)) / (2 ln base); the ramp runs from floor(d(beta_fast)) to ceil(d(beta_slow)), clipped to
    [0, R - 1] (not rounded when `truncate` is False; at least 0.001 wide). Sines and cosines are multiplied by
    `attention_factor`, 0.1 ln(factor) + 1 when None.
    """

    kind: ClassVar[str] = "yarn"
    factor: float
    original_max_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        require(self.factor >= 1, f"YarnScaling.factor={self.factor} must be at least 1.")
        require_positive(self, "original_max_len")
        require(
            self.beta_fast > self.beta_slow > 0,
            f"YarnScaling needs beta_fast > beta_slow > 0, got {self.beta_fast} and {self.beta_slow}.",
        )


@dataclass(frozen=True)
class Llama3Scaling:
    """Wavelengths above M/low divided by `factor` in frequency, below M/high kept, blended between (M original)."""

    kind: ClassVar[str] = "llama3"
    factor: float
    original_max_len: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        require(self.factor >= 1, f"Llama3Scaling.factor={self.factor} must be at least 1.")
        require_positive(self, "original_max_len")
        require(
            self.high_freq_factor > self.low_freq_factor > 0,
            f"Llama3Scaling needs high_freq_factor > low_freq_factor > 0, got {self.high_freq_factor} and "
            f"{self.low_freq_factor}.",
        )


RotaryScaling = LinearScaling | NTKScaling | YarnScaling | Llama3Scaling


@dataclass(frozen=True)
class Rotary:
    """Queries and keys rotated by angle p * base^(-2i/R) in R/2 planes. Su et al. 2021.

    `halves` pairs component i with i + R/2 (NeoX, Llama); `interleaved` pairs 2i with 2i+1 (the paper, GPT-J). The two
    are not interchangeable for given weights. Only the first R = d_head * fraction components are rotated.
    """

    kind: ClassVar[str] = "rotary"
    base: float = 10000.0
    pairing: Literal["halves", "interleaved"] = "halves"
    fraction: float = 1.0
    scaling: LinearScaling | NTKScaling | YarnScaling | Llama3Scaling | None = None

    def __post_init__(self) -> None:
        require(self.base > 1, f"Rotary.base={self.base} must exceed 1.")
        require_choice(self, "pairing", Literal["halves", "interleaved"])
        require(0 < self.fraction <= 1, f"Rotary.fraction={self.fraction} must be in (0, 1].")

    def rotated(self, d_head: int) -> int:
        """R, the number of rotated components of a head."""
        return int(d_head * self.fraction)


@dataclass(frozen=True)
class Alibi:
    """-slope_h * |query position - key position| added to the scores. Press et al. 2022.

    Slopes are 2^(-8h/n) for h = 1..n when n = H is a power of two; otherwise the slopes of the largest power of two
    below H, followed by every other slope (h = 1, 3, 5, ...) of twice that power.
    """

    kind: ClassVar[str] = "alibi"


@dataclass(frozen=True)
class T5Bias:
    """A trained scalar per head and bucket of (key position - query position), shared by all layers of a stack.

    Raffel et al. 2020, 2.1. An encoder spends half the buckets on each direction; a decoder spends all on the past.
    Half of a direction's buckets are exact distances, the rest logarithmic up to `max_distance`.
    """

    kind: ClassVar[str] = "t5_bias"
    buckets: int = 32
    max_distance: int = 128

    def __post_init__(self) -> None:
        require(
            self.buckets >= 4 and self.buckets % 4 == 0,
            f"T5Bias.buckets={self.buckets} must be a multiple of 4: two directions, each half exact and "
            "half logarithmic.",
        )
        require(
            self.max_distance > self.buckets // 2,
            f"T5Bias.max_distance={self.max_distance} must exceed buckets/2={self.buckets // 2}, "
            "or the logarithmic buckets are empty.",
        )


@dataclass(frozen=True)
class Infused:
    """Position vectors added to what queries and keys read, in every block, never to values nor to the stream.

    q = (x + p) W_q, k = (x + p) W_k, v = x W_v, with x the (normed) input of attention and p from one table for all
    blocks of a stack: `vectors` says which, fixed waves or a trained one. The stream then holds nothing but content.
    Press, Smith and Lewis 2021 ("Shortformer"), section 5.
    """

    kind: ClassVar[str] = "infused"
    vectors: Sinusoidal | Learned = Sinusoidal()


Position = NoPosition | Learned | Sinusoidal | Rotary | Alibi | T5Bias | Infused
