"""Position schemes: one type each, and the four scalings of rotary positions.

What the rest of the package needs to know about a scheme is declared on its type (see `Scheme`): which table it
trains, whether it adds to the scores, its formula. The model and the NumPy reference implement it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from glassformer.errors import require, require_choice, require_positive

if TYPE_CHECKING:
    from glassformer.config.model import ModelConfig

WaveLayout = Literal["interleaved", "halves"]
"""Whether the two components of a pair are neighbours, or one half of the vector apart."""
WaveSpacing = Literal["exclusive", "inclusive"]
"""Whether the last frequency of sinusoids comes before 1/base, or is 1/base."""


class Scheme:
    """The base of all position schemes: what sizing, the reference, the lens and the studio read about one."""

    kind: ClassVar[str]
    """The name in run files and model files."""
    former_kinds: ClassVar[tuple[str, ...]] = ()
    """Names under which older files have it."""
    title: ClassVar[str]
    """The name that views and pages print."""
    formula: ClassVar[str] = ""
    """The scheme in LaTeX."""
    biases_scores: ClassVar[bool] = False
    """True if it adds a (H,T,S) bias to the scores of every block."""

    def check(self, config: "ModelConfig") -> None:
        """Raise ConfigError if the scheme does not fit the other fields of a config."""

    def table(self, config: "ModelConfig") -> dict[str, int]:
        """Return the named dimensions of the table that each stack trains, as in {"rows": 1024, "D": 768}; {} for none.

        The names are letters of the alphabet, or words that the size sheet explains with their value.
        """
        return {}


@dataclass(frozen=True)
class NoPosition(Scheme):
    """No position information at all: order is visible only through the causal mask, if there is one."""

    kind: ClassVar[str] = "none"
    title: ClassVar[str] = "no positions"


@dataclass(frozen=True)
class Learned(Scheme):
    """A trained table with max_len + offset rows; position p reads row p + offset (RoBERTa's offset is 2)."""

    kind: ClassVar[str] = "learned"
    title: ClassVar[str] = "learned positions"
    formula: ClassVar[str] = r"x_t \leftarrow x_t + P_t"
    offset: int = 0
    """Number of rows at the start of the table that no position reads."""

    def __post_init__(self) -> None:
        require(self.offset >= 0, f"Learned.offset={self.offset} must be 0 or more: it skips rows of the table.")

    def check(self, config: "ModelConfig") -> None:
        require(config.max_len is not None, "learned positions need max_len: it is the length of their table.")

    def table(self, config: "ModelConfig") -> dict[str, int]:
        letter = "D" if config.position_width == config.d_model else "width"
        return {"rows": (config.max_len or 0) + self.offset, letter: config.position_width}


@dataclass(frozen=True)
class Sinusoidal(Scheme):
    """Fixed waves sin(p w_i), cos(p w_i), w_i = base^(-2i/D), added to the embedding. Vaswani et al. 2017, 3.5.

    `interleaved` puts sin at component 2i and cos at 2i+1 (the paper); `halves` puts all sines first (tensor2tensor).
    """

    kind: ClassVar[str] = "sinusoidal"
    title: ClassVar[str] = "sinusoidal positions"
    formula: ClassVar[str] = (
        r"x_t \leftarrow x_t + p_t, \quad p_{t,2i} = \sin(t\,\omega_i), \; p_{t,2i+1} = \cos(t\,\omega_i)"
    )
    base: float = 10000.0
    """The longest wavelength is 2 pi times nearly this many positions."""
    layout: WaveLayout = "interleaved"
    """Order of the components: `interleaved` sines and cosines, or all sines before all cosines (`halves`)."""
    spacing: WaveSpacing = "exclusive"
    """Frequencies of the D/2 waves: base^(-2i/D) (`exclusive`), or base^(-i/(D/2 - 1)), which ends at 1/base
    (`inclusive`: fairseq, M2M-100)."""
    offset: int = 0
    """Added to every position: the first token is at position `offset` (2 in M2M-100)."""

    def __post_init__(self) -> None:
        require(self.base > 1, f"Sinusoidal.base={self.base} must exceed 1.")
        require_choice(self, "layout", WaveLayout)
        require_choice(self, "spacing", WaveSpacing)
        require(self.offset >= 0, f"Sinusoidal.offset={self.offset} must be 0 or more.")

    def check(self, config: "ModelConfig") -> None:
        width = config.position_width
        name = "d_model" if width == config.d_model else "embedding.width"
        require(width % 2 == 0, f"sinusoidal positions pair components: {name}={width} must be even.")
        require(
            self.spacing == "exclusive" or width > 2,
            f"inclusive spacing needs two frequencies or more: {name}={width} must exceed 2.",
        )


@dataclass(frozen=True)
class LinearScaling:
    """Every frequency divided by `factor`: positions are interpolated. Chen et al. 2023."""

    kind: ClassVar[str] = "linear"
    factor: float
    """Ratio of the new to the original context."""

    def __post_init__(self) -> None:
        require(self.factor >= 1, f"LinearScaling.factor={self.factor} must be at least 1.")


@dataclass(frozen=True)
class NTKScaling:
    """The base multiplied by factor^(R/(R-2)): high frequencies stay, the lowest is divided by `factor`."""

    kind: ClassVar[str] = "ntk"
    factor: float
    """Ratio of the new to the original context."""

    def __post_init__(self) -> None:
        require(self.factor >= 1, f"NTKScaling.factor={self.factor} must be at least 1.")


@dataclass(frozen=True)
class YarnScaling:
    """Low frequencies interpolated, high ones kept, a linear ramp between. Peng et al. 2023, 3.2 to 3.4.

    With original context M and R rotated components, the pair that makes `t` rotations over M has index
    d(t) = R ln(M / (2 pi t)) / (2 ln base); the ramp runs from floor(d(beta_fast)) to ceil(d(beta_slow)), clipped to
    [0, R - 1] (not rounded when `truncate` is False; at least 0.001 wide). Sines and cosines are multiplied by
    `attention_factor`, 0.1 ln(factor) + 1 when None.
    """

    kind: ClassVar[str] = "yarn"
    factor: float
    """Ratio of the new to the original context."""
    original_max_len: int
    """The context that the model was trained with, in tokens."""
    beta_fast: float = 32.0
    """Pairs with at least this many rotations over the original context keep their frequency."""
    beta_slow: float = 1.0
    """Pairs with at most this many rotations over the original context are interpolated."""
    attention_factor: float | None = None
    """Factor on sines and cosines. Default: 0.1 ln(factor) + 1."""
    truncate: bool = True
    """Round the ends of the ramp to whole pairs."""

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
    """Ratio of the new to the original context."""
    original_max_len: int
    """M, the context that the model was trained with, in tokens."""
    low_freq_factor: float = 1.0
    """Pairs with at most this many rotations over M are interpolated."""
    high_freq_factor: float = 4.0
    """Pairs with at least this many rotations over M keep their frequency."""

    def __post_init__(self) -> None:
        require(self.factor >= 1, f"Llama3Scaling.factor={self.factor} must be at least 1.")
        require_positive(self, "original_max_len")
        require(
            self.high_freq_factor > self.low_freq_factor > 0,
            f"Llama3Scaling needs high_freq_factor > low_freq_factor > 0, got {self.high_freq_factor} and "
            f"{self.low_freq_factor}.",
        )


@dataclass(frozen=True)
class LongScaling:
    """Frequency i divided by short_i, or by long_i in a sequence of more than M tokens. LongRoPE, Ding et al. 2024.

    Which divisors are used changes when a sequence grows beyond M = `original_max_len`, also for its earlier tokens:
    a KV cache cannot be continued across M. Sines and cosines are multiplied by `attention_factor` in both cases.
    """

    kind: ClassVar[str] = "long"
    short: tuple[float, ...]
    """The divisor of each frequency for sequences of up to M tokens."""
    long: tuple[float, ...]
    """The divisor of each frequency for longer sequences."""
    original_max_len: int
    """M, the context that the model was trained with, in tokens."""
    attention_factor: float = 1.0
    """Factor on sines and cosines."""

    def __post_init__(self) -> None:
        require_positive(self, "original_max_len")
        require(self.attention_factor > 0, f"LongScaling.attention_factor={self.attention_factor} must be positive.")
        require(
            all(isinstance(divisor, int | float) and divisor > 0 for divisor in (*self.short, *self.long)),
            "LongScaling.short and LongScaling.long must hold positive numbers.",
        )


RotaryScaling = LinearScaling | NTKScaling | YarnScaling | Llama3Scaling | LongScaling
"""Every scaling of rotary positions."""


@dataclass(frozen=True)
class Rotary(Scheme):
    """Queries and keys rotated by angle p * base^(-2i/R) in R/2 planes. Su et al. 2021.

    `halves` pairs component i with i + R/2 (NeoX, Llama); `interleaved` pairs 2i with 2i+1 (the paper, GPT-J). The two
    are not interchangeable for given weights. Only the first R = d_head * fraction components are rotated.
    """

    kind: ClassVar[str] = "rotary"
    title: ClassVar[str] = "rotary positions"
    formula: ClassVar[str] = (
        r"q_t \leftarrow R_t q_t, \; k_s \leftarrow R_s k_s, \quad R_t = \text{rotation by } t\,\omega_i"
    )
    base: float = 10000.0
    """Base of the frequencies base^(-2i/R)."""
    pairing: WaveLayout = "halves"
    """Which components are rotated together: i and i + R/2 (`halves`), or 2i and 2i+1 (`interleaved`)."""
    fraction: float = 1.0
    """Fraction of the components of a head that are rotated."""
    scaling: RotaryScaling | None = None
    """Change of the frequencies for a longer context than that of the training; none: no change."""

    def __post_init__(self) -> None:
        require(self.base > 1, f"Rotary.base={self.base} must exceed 1.")
        require_choice(self, "pairing", WaveLayout)
        require(0 < self.fraction <= 1, f"Rotary.fraction={self.fraction} must be in (0, 1].")

    def check(self, config: "ModelConfig") -> None:
        rotated = self.rotated(config.d_head)
        require(
            rotated >= 2 and rotated % 2 == 0,
            f"rotary positions rotate pairs: d_head={config.d_head} times fraction={self.fraction} gives "
            f"{rotated}, which must be even and at least 2.",
        )
        require(
            not isinstance(self.scaling, NTKScaling) or rotated > 2,
            "NTK scaling raises to R/(R-2) and needs more than 2 rotated components per head.",
        )
        if isinstance(self.scaling, LongScaling):
            given = {len(self.scaling.short), len(self.scaling.long)}
            require(
                given == {rotated // 2},
                f"LongScaling needs {rotated // 2} numbers in `short` and in `long`, one for each frequency, got "
                f"{len(self.scaling.short)} and {len(self.scaling.long)}.",
            )

    def rotated(self, d_head: int) -> int:
        """Return R, the number of rotated components of a head."""
        return int(d_head * self.fraction + 1e-9)  # 64/192 of 192 is 64, not 63


@dataclass(frozen=True)
class Alibi(Scheme):
    """-scale * slope_h * |query position - key position| added to the scores. Press et al. 2022.

    Slopes are 2^(-8h/n) for h = 1..n when n = H is a power of two; otherwise the slopes of the largest power of two
    below H, followed by every other slope (h = 1, 3, 5, ...) of twice that power.
    """

    kind: ClassVar[str] = "alibi"
    title: ClassVar[str] = "ALiBi"
    formula: ClassVar[str] = r"s_{h,t,s} \leftarrow s_{h,t,s} - m_h |t - s|"
    biases_scores: ClassVar[bool] = True
    scale: float = 1.0
    """Factor on the bias (1/sqrt(K) in Falcon-RW, which adds it before it scales the scores)."""
    rounded: bool = False
    """Round slope_h * position of query and key to bfloat16 before the difference is taken, as Falcon-RW does."""

    def __post_init__(self) -> None:
        require(self.scale > 0, f"Alibi.scale={self.scale} must be positive.")


@dataclass(frozen=True)
class T5Bias(Scheme):
    """A trained scalar per head and bucket of (key position - query position), shared by all layers of a stack.

    Raffel et al. 2020, 2.1. An encoder spends half the buckets on each direction; a decoder spends all on the past.
    Half of a direction's buckets are exact distances, the rest logarithmic up to `max_distance`.
    """

    kind: ClassVar[str] = "t5_bias"
    title: ClassVar[str] = "T5 bias"
    formula: ClassVar[str] = r"s_{h,t,s} \leftarrow s_{h,t,s} + b_{h, \operatorname{bucket}(s - t)}"
    biases_scores: ClassVar[bool] = True
    buckets: int = 32
    """Number of buckets of distances, a multiple of 4."""
    max_distance: int = 128
    """Distance from which on all keys share the last bucket."""

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

    def table(self, config: "ModelConfig") -> dict[str, int]:
        return {"buckets": self.buckets, "H": config.n_heads}


@dataclass(frozen=True)
class QueryKeyPosition(Scheme):
    """Position vectors added to the input of queries and keys in every block, not to values or the residual stream.

    q = (x + p) W_q, k = (x + p) W_k, v = x W_v, with x the (normed) input of attention and p from one table for all
    blocks of a stack. Press, Smith and Lewis 2021 ("Shortformer"), section 5.
    """

    kind: ClassVar[str] = "query_key"
    former_kinds: ClassVar[tuple[str, ...]] = ("infused",)
    title: ClassVar[str] = "query/key positions"
    formula: ClassVar[str] = r"q, k \text{ read } x_t + p_t"
    vectors: Sinusoidal | Learned = Sinusoidal()
    """The position vectors p: fixed waves, or a trained table."""

    def check(self, config: "ModelConfig") -> None:
        self.vectors.check(config)
        require(
            config.embedding.width is None,
            "query/key positions do not support embedding.width: leave it out, or use another position scheme.",
        )

    def table(self, config: "ModelConfig") -> dict[str, int]:
        return self.vectors.table(config)


Position = NoPosition | Learned | Sinusoidal | Rotary | Alibi | T5Bias | QueryKeyPosition
"""Every position scheme. Configs, run files, the command line and the studio read this type."""
