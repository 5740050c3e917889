"""Exercises about positions: the sinusoidal table, rotary embeddings."""

import numpy as np

from glassformer.theory.exercises.exercise import Array, Case, Exercise, Mistake


def sinusoidal(n: int, d: int) -> Array:
    """Return the table of position embeddings, (n, d)."""
    w = 10000.0 ** (-2 * np.arange(d // 2) / d)
    angles = np.arange(n)[:, None] * w
    table = np.zeros((n, d))
    table[:, 0::2] = np.sin(angles)
    table[:, 1::2] = np.cos(angles)
    return table


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
        Mistake("your positions start at 1: the first is 0", {"np.arange(n)": "np.arange(1, n + 1)"}),
        Mistake(
            "you put all sines before all cosines: alternate them, sine in even and cosine in odd components",
            {"0::2": ": d // 2", "1::2": "d // 2 :"},
        ),
        Mistake(
            "you swapped sine and cosine: even components are sines", {"0::2": "9::2", "1::2": "0::2", "9::2": "1::2"}
        ),
        Mistake("you use sines in the odd components too: use cosines there", {"np.cos": "np.sin"}),
        Mistake("your exponent is i/d: it is 2i/d, for both components of pair i", {"-2 * ": "-"}),
        Mistake(
            "your exponent is 2i/(d-2): it is 2i/d, so the lowest frequency is not quite 1/10000",
            {" / d)": " / max(d - 2, 1))"},
        ),
        Mistake("your frequencies grow with i: the exponent of 10000 is minus 2i/d", {"-2 * ": "2 * "}),
        Mistake("your base is 1000: it is 10000", {"10000.0": "1000.0"}),
        Mistake(
            "your cosines have the exponent (2i+1)/d: sine and cosine of a pair share the frequency with exponent 2i/d",
            {"np.cos(angles)": "np.cos(np.arange(n)[:, None] * 10000.0 ** (-(2 * np.arange(d // 2) + 1) / d))"},
        ),
        Mistake(
            "you use the index of the component as i: i counts pairs, so component j belongs to pair j // 2",
            {
                "np.sin(angles)": "np.sin(angles * w)",
                "np.cos(angles)": "np.cos(np.arange(n)[:, None] * 10000.0 ** (-2 * (2 * np.arange(d // 2) + 1) / d))",
            },
        ),
    ),
    claims=("sinusoid-shift-rotation", "sine-only-fails", "sinusoid-frequency-spectrum"),
    sources=("Ch. 13 ex. 11",),
)


def rope(x: Array, positions: Array, base: float) -> Array:
    """Return x with each row rotated by its position."""
    d = x.shape[1]
    angles = positions[:, None] * base ** (-2 * np.arange(d // 2) / d)
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = x[:, 0::2], x[:, 1::2]
    rotated = np.zeros_like(x)
    rotated[:, 0::2] = first * cos - second * sin
    rotated[:, 1::2] = first * sin + second * cos
    return rotated


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
        Mistake(
            "your positions are one too large: use the given positions without a shift",
            {"positions[:, None]": "(positions[:, None] + 1)"},
        ),
        Mistake(
            "you use the row index for the angle: use `positions`", {"positions[:, None]": "np.arange(len(x))[:, None]"}
        ),
        Mistake(
            "you pair component i with i + d/2: in this exercise, pair 2i with 2i+1",
            {"0::2": ": d // 2", "1::2": "d // 2 :"},
        ),
        Mistake(
            "you rotate in the opposite direction: the first component is x0 cos a - x1 sin a",
            {"angles = positions": "angles = -positions"},
        ),
        Mistake("your exponent is i/d: it is 2i/d", {"-2 * ": "-"}),
        Mistake(
            "you compute the second component of a pair from the new first one: use the old value of both",
            {"rotated[:, 1::2] = first * sin": "rotated[:, 1::2] = rotated[:, 0::2] * sin"},
        ),
        Mistake(
            "you put all first components before all second ones: pair i belongs into the components 2i and 2i+1",
            {"return rotated": "return np.concatenate([rotated[:, 0::2], rotated[:, 1::2]], 1)"},
        ),
        Mistake(
            "your frequencies grow with i: the angle of pair i is p · base to the power minus 2i/d",
            {"-2 * ": "2 * "},
        ),
    ),
    claims=("rope-relative", "pe-extrapolation"),
)


def extrapolation(
    q: Array, k: Array, table: Array, slope: float, distance: int, positions: list[int]
) -> tuple[Array, Array, Array, Array]:
    """Return the scores (learned, sinusoids, rotary, alibi), each (P)."""
    width = np.sqrt(len(q))
    learned, sinusoids, rotary, alibi = [], [], [], []
    waves = sinusoidal(max(positions) + 1, len(q))
    for p in positions:
        s = p - distance
        learned.append((q + table[p]) @ (k + table[s]) / width if p < len(table) else np.nan)
        sinusoids.append((q + waves[p]) @ (k + waves[s]) / width)
        rotated_q = rope(q[None], np.array([p]), 10000.0)[0]
        rotated_k = rope(k[None], np.array([s]), 10000.0)[0]
        rotary.append(rotated_q @ rotated_k / width)
        alibi.append(q @ k / width - slope * distance)
    return np.array(learned), np.array(sinusoids), np.array(rotary), np.array(alibi)


def _extrapolation_cases(rng: np.random.Generator) -> list[Case]:
    def made(label: str, d: int, trained: int, distance: int, positions: list[int]) -> Case:
        q, k, table = rng.normal(size=d), rng.normal(size=d), rng.normal(size=(trained, d))
        slope = float(rng.uniform(0.1, 0.5))
        arguments = {"q": q, "k": k, "table": table, "slope": slope, "distance": distance, "positions": positions}
        return Case(label, arguments)

    return [
        made("8 trained positions, distance 2", 6, 8, 2, [3, 5, 7, 8, 9, 20, 100]),
        made("16 trained positions, distance 5", 8, 16, 5, [5, 10, 15, 16, 40]),
        made("distance 9", 4, 12, 9, [10, 11, 12, 50]),
    ]


EXTRAPOLATION = Exercise(
    id="position-extrapolation",
    title="Position schemes beyond the trained length",
    problem="""\
A query and a key keep their contents and their distance, and move along the text to positions that training never
showed. What happens to their score under four position schemes? `sinusoidal(n, d)` and `rope(x, positions, base)` are
given.

  q, k (d)          contents of the query and the key
  table (N, d)      learned position embeddings of the N trained positions
  slope             of ALiBi
  distance          the key is `distance` positions before the query
  positions         P positions of the query

Compute the score for every query position p (key position s = p - distance), divided by √d in every scheme:

  learned       (q + table[p]) · (k + table[s]); NaN if p is beyond the table, because no embedding exists
  sinusoids     the same with rows p and s of the sinusoidal table
  rotary        rope(q at p) · rope(k at s), base 10000
  alibi         q · k / √d - slope · distance

Return the four arrays (P) in this order. Rotary and ALiBi scores do not change with p: they depend on the distance
alone. That does not make them equally good at distances that training never showed (claim pe-extrapolation).""",
    solve=extrapolation,
    cases=_extrapolation_cases,
    returns=("learned", "sinusoids", "rotary", "alibi"),
    mistakes=(
        Mistake(
            "you repeat the last row of the table beyond it: there is no embedding, so the score is NaN",
            {
                "table[p]) @ (k + table[s]) / width if p < len(table) else np.nan": (
                    "table[min(p, len(table) - 1)]) @ (k + table[min(s, len(table) - 1)]) / width"
                )
            },
        ),
        Mistake(
            "you start the table again beyond its end: there is no embedding, so the score is NaN",
            {
                "table[p]) @ (k + table[s]) / width if p < len(table) else np.nan": (
                    "table[p % len(table)]) @ (k + table[s % len(table)]) / width"
                )
            },
        ),
        Mistake("you do not divide the scores by √d", {"np.sqrt(len(q))": "1.0"}),
        Mistake("your ALiBi rewards distance: subtract slope · distance", {"- slope": "+ slope"}),
        Mistake(
            "your ALiBi penalty is divided by √d too: divide only the dot product",
            {"q @ k / width - slope * distance": "(q @ k - slope * distance) / width"},
        ),
        Mistake(
            "you rotate the query alone: the key is rotated by its own position",
            {"rotary.append(rotated_q @ rotated_k": "rotary.append(rotated_q @ k"},
        ),
        Mistake(
            "your key comes after the query: its position is p - distance",
            {
                "s = p - distance": "s = p + distance",
                "sinusoidal(max(positions) + 1,": "sinusoidal(max(positions) + distance + 1,",
                "if p < len(table) else": "if s < len(table) else",
            },
        ),
        Mistake(
            "you add the sinusoids to the query alone: the key gets those of its own position",
            {"@ (k + waves[s])": "@ k"},
        ),
    ),
    claims=("pe-extrapolation", "rope-relative", "sinusoid-relative-score"),
    sources=("Ch. 13 ex. 12",),
    given=("sinusoidal", "rope"),
)
