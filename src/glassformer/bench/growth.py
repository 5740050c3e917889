"""How cost grows: time of a token by its context, of a prompt by its length, bytes of the cache by the batch.

Each curve is fitted by t = a + b·nᵖ. The exponent p is compared with the exponent of the same fit to the number of
operations (or bytes) that the theory counts at the same lengths, and with the limit for large n: a token costs O(S)
with a cache and O(S²) without, a prompt O(T²), and the cache holds O(B) numbers. The model is one narrow block, so
that attention dominates the matrices.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from glassformer import config as c
from glassformer.bench.commands import seconds_of
from glassformer.sizing import decode_flops, flops, inference_memory

WIDTH, HEADS, VOCABULARY = 64, 4, 256
CONTEXTS = (4096, 8192, 16384, 32768, 65536)
LENGTHS = (512, 1024, 2048, 4096)
BATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Curve:
    """One cost as a function of one quantity, measured and counted."""

    name: str
    quantity: str
    unit: str
    at: tuple[int, ...]
    measured: tuple[float, ...]
    counted: tuple[float, ...]
    limit: int
    """The exponent of the theory for large n."""
    disturbed: tuple[int, ...] = ()
    """Points whose fastest rounds do not agree within 20 %: other work on the machine disturbed them all."""

    @property
    def exponent(self) -> float | None:
        """The measured exponent; None where a point was disturbed."""
        return None if self.disturbed else fit(self.at, self.measured)

    @property
    def expected(self) -> float:
        """The exponent of what is counted, at the same points."""
        return fit(self.at, self.counted)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "exponent": self.exponent, "expected": self.expected}


def fit(at: Sequence[float], values: Sequence[float]) -> float:
    """Return p of the best fit a + b·nᵖ with a, b >= 0: least squares of relative errors, p in steps of 0.01."""
    import numpy as np

    n, t = np.asarray(at, float), np.asarray(values, float)
    best, found = float("inf"), 0.0
    for p in np.arange(0.0, 3.005, 0.01):
        columns = np.stack([np.ones_like(n), (n / n[-1]) ** p], 1) / t[:, None]
        for used in ([0, 1], [1]):  # with the constant, or without it where it would be negative
            solved = np.linalg.lstsq(columns[:, used], np.ones_like(t), rcond=None)[0]
            if (solved < 0).any():
                continue
            error = float(np.square(columns[:, used] @ solved - 1).sum())
            if error < best - 1e-12:
                best, found = error, float(p)
    return found


def config(max_len: int) -> c.DecoderConfig:
    return c.DecoderConfig(
        vocab_size=VOCABULARY, d_model=WIDTH, n_layers=1, attention=c.Attention(HEADS), feedforward=c.Dense(4 * WIDTH),
        position=c.Rotary(), max_len=max_len,
    )  # fmt: skip


def measure(
    contexts: Sequence[int] = CONTEXTS,
    lengths: Sequence[int] = LENGTHS,
    batches: Sequence[int] = BATCHES,
    rounds: int = 7,
    say: Callable[[str], None] = lambda line: None,
) -> list[Curve]:
    """Measure the three curves. Without a cache, a token costs as much as a prompt: one curve serves for both."""
    import torch

    from glassformer.model import build

    torch.manual_seed(0)
    model: Any = build(config(max(*contexts, *lengths) + rounds + 2)).eval()
    cfg = model.config

    def cached(context: int) -> tuple[float, bool]:
        """Time a token after `context` others, whose keys and values are random: only their number matters."""
        cache = model.new_cache("static", capacity=context + rounds + 1)
        cache.append(context, None, None)
        for layer in cache.layers:
            layer.extend(*(torch.randn(1, cfg.n_kv_heads, context, cfg.d_head) for _ in range(2)))
        token = torch.zeros(1, 1, dtype=torch.long)
        return _best(lambda: model(token, cache=cache), rounds)

    def read(length: int) -> tuple[float, bool]:
        tokens = torch.zeros(1, length, dtype=torch.long)
        return _best(lambda: model.encode(tokens), rounds)

    def bytes_of(batch: int) -> tuple[float, bool]:
        cache = model.new_cache("growing")
        model.encode(torch.zeros(batch, 64, dtype=torch.long), cache=cache)
        return float(sum(layer.n_bytes() for layer in cache.layers)), True

    def curve(name: str, quantity: str, unit: str, at: Sequence[int], measured: Any, counted: Any, limit: int) -> Curve:
        say(name)
        points = [measured(n) for n in at]
        disturbed = tuple(n for n, (_, agree) in zip(at, points, strict=True) if not agree)
        best, expected = tuple(value for value, _ in points), tuple(map(counted, at))
        return Curve(name, quantity, unit, tuple(at), best, expected, limit, disturbed)

    with torch.no_grad():
        return [
            curve("a token, with a cache", "context", "s", contexts, cached,
                  lambda n: float(sum(decode_flops(cfg, n).values())), 1),
            curve("a prompt, or a token without", "length", "s", lengths, read,
                  lambda n: float(sum(flops(cfg, 1, n).needed.values())), 2),
            curve("the cache", "batch", "bytes", batches, bytes_of,
                  lambda n: float(inference_memory(cfg, n, 64).cache), 1),
        ]  # fmt: skip


AGREE = 0.2
"""The fastest three rounds of a point must agree within this fraction."""


def _best(work: Callable[[], Any], rounds: int) -> tuple[float, bool]:
    """Return the seconds of the fastest round, and whether the fastest three agree, as quiet rounds do."""
    work()
    fastest = sorted(seconds_of(work) for _ in range(rounds))[:3]
    return fastest[0], len(fastest) == 3 and fastest[-1] <= (1 + AGREE) * fastest[0]


def text(curves: Sequence[Curve]) -> str:
    """Return the table. A curve with a disturbed point has no exponent; too few rounds count as disturbed."""
    lines = [f"{'':28}{'exponent':>10}{'counted':>10}{'limit':>8}   measured"]
    for one in curves:
        scale, unit = (1e3, "ms") if one.unit == "s" else (1.0, "bytes")
        points = ", ".join(f"{n:,}: {v * scale:,.4g}" for n, v in zip(one.at, one.measured, strict=True))
        exponent = "-" if one.exponent is None else f"{one.exponent:.2f}"
        lines.append(
            f"{one.name:28}{exponent:>10}{one.expected:>10.2f}{one.limit:>8}   {unit} by {one.quantity}: {points}"
        )
        if one.disturbed:
            where = ", ".join(f"{n:,}" for n in one.disturbed)
            lines.append(
                f"  exponent not measured: disturbed at {where}, where the fastest three rounds differ by more than "
                f"{AGREE:.0%} or there are fewer than three: use --rounds 5 or more on a quiet machine."
            )
    return "\n".join(lines)
