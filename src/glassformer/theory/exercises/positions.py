"""Exercises about positions: the sinusoidal table, rotary embeddings."""

import numpy as np

from glassformer.theory.exercises.exercise import Case, Exercise, Mistake

Array = np.ndarray


def _frequencies(d: int, base: float, exponent: str) -> Array:
    i = np.arange(d // 2)
    powers = {"2i/d": 2 * i / d, "i/d": i / d, "2i/(d-2)": 2 * i / max(d - 2, 1), "positive": -2 * i / d}
    return np.asarray(base ** -powers[exponent])


def sinusoidal(
    n: int, d: int, *, first: int = 0, layout: str = "pairs", exponent: str = "2i/d", base: float = 10000.0
) -> Array:
    """Return the table of position embeddings, (n, d)."""
    angles = (np.arange(n) + first)[:, None] * _frequencies(d, base, exponent)
    sines, cosines = np.sin(angles), np.cos(angles)
    if layout == "halves":
        return np.hstack([sines, cosines])
    first_wave, second_wave = (cosines, sines) if layout == "swapped" else (sines, cosines)
    if layout == "sines":
        second_wave = sines
    return np.stack([first_wave, second_wave], -1).reshape(n, d)


SINUSOIDAL = Exercise(
    id="sinusoidal",
    title="Sinusoidal positions",
    problem="""\
Compute the table of sinusoidal position embeddings for n positions and an even width d:

  PE[p, 2i]   = sin(p · w_i)
  PE[p, 2i+1] = cos(p · w_i)      with w_i = 10000^(-2i/d)

Positions p and components are counted from 0. Return an array (n, d).""",
    solve=sinusoidal,
    cases=lambda rng: [
        Case("6 positions of width 8", {"n": 6, "d": 8}),
        Case("50 positions of width 16", {"n": 50, "d": 16}),
        Case("width 2", {"n": 5, "d": 2}),
        Case("one position", {"n": 1, "d": 6}),
    ],
    returns=("table",),
    mistakes=(
        Mistake("your positions start at 1: the first is 0", {"first": 1}),
        Mistake(
            "you put all sines before all cosines: alternate them, sine in even and cosine in odd components",
            {"layout": "halves"},
        ),
        Mistake("you swapped sine and cosine: even components are sines", {"layout": "swapped"}),
        Mistake("you use sines in the odd components too: use cosines there", {"layout": "sines"}),
        Mistake("your exponent is i/d: it is 2i/d, for both components of pair i", {"exponent": "i/d"}),
        Mistake(
            "your exponent is 2i/(d-2): it is 2i/d, so the lowest frequency is not quite 1/10000",
            {"exponent": "2i/(d-2)"},
        ),
        Mistake("your frequencies grow with i: the exponent of 10000 is minus 2i/d", {"exponent": "positive"}),
        Mistake("your base is 1000: it is 10000", {"base": 1000.0}),
    ),
    claims=("sinusoid-shift-rotation", "sine-only-fails", "sinusoid-frequency-spectrum"),
)


def rope(
    x: Array,
    positions: Array,
    base: float,
    *,
    shift: int = 0,
    pairs: str = "neighbours",
    sign: int = 1,
    exponent: str = "2i/d",
    counted: bool = False,
) -> Array:
    """Return x with each row rotated by its position."""
    T, d = x.shape
    at = (np.arange(T) if counted else np.asarray(positions)) + shift
    angles = sign * at[:, None] * _frequencies(d, base, exponent)
    cos, sin = np.cos(angles), np.sin(angles)
    if pairs == "neighbours":
        a, b = x[:, 0::2], x[:, 1::2]
        return np.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(T, d)
    a, b = x[:, : d // 2], x[:, d // 2 :]
    return np.hstack([a * cos - b * sin, a * sin + b * cos])


def _rope_cases(rng: np.random.Generator) -> list[Case]:
    return [
        Case("4 rows at positions 0 to 3", {"x": rng.normal(size=(4, 6)), "positions": np.arange(4), "base": 10000.0}),
        Case(
            "positions 3, 100, 7",
            {"x": rng.normal(size=(3, 8)), "positions": np.array([3, 100, 7]), "base": 10000.0},
            "use the given positions for the angle, not the row index",
        ),
        Case(
            "base 100",
            {"x": rng.normal(size=(5, 4)), "positions": np.arange(2, 7), "base": 100.0},
            "use the given base, not 10000",
        ),
    ]


ROPE = Exercise(
    id="rope",
    title="Rotary positions",
    problem="""\
Apply rotary position embedding (RoPE) to queries or keys. Neighbouring components form pairs (2i, 2i+1). In the row at
position p, pair i is rotated by the angle a = p · base^(-2i/d):

  (x0, x1)  becomes  (x0 cos a - x1 sin a,  x0 sin a + x1 cos a)

  x (T, d)         d is even
  positions (T)    whole numbers, in any order
  base             10000 in most models

Return an array (T, d).""",
    solve=rope,
    cases=_rope_cases,
    returns=("rotated",),
    mistakes=(
        Mistake("your positions are one too large: use the given positions without a shift", {"shift": 1}),
        Mistake("you use the row index for the angle: use `positions`", {"counted": True}),
        Mistake("you pair component i with i + d/2: in this exercise, pair 2i with 2i+1", {"pairs": "halves"}),
        Mistake("you rotate in the opposite direction: the first component is x0 cos a - x1 sin a", {"sign": -1}),
        Mistake("your exponent is i/d: it is 2i/d", {"exponent": "i/d"}),
        Mistake(
            "your frequencies grow with i: the angle of pair i is p · base to the power minus 2i/d",
            {"exponent": "positive"},
        ),
    ),
    claims=("rope-relative", "pe-extrapolation"),
)
