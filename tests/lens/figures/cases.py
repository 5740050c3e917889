"""Every figure with a small and a large input, and with tokens that are hard to draw."""

import functools
import math

import numpy as np

from glassformer.lens import figures as f

WORDS = [" the", "quick", "\n", "$x$", "猫が", "😀🙂", " antidisestablishment", "a", "שלום", "\t", "��", "x_1^2"]


def words(n: int) -> list[str]:
    return [WORDS[i % len(WORDS)] for i in range(n)]


def pattern(L: int, H: int, T: int, S: int | None = None, causal: bool = True) -> np.ndarray:
    """Random attention; one layer's worth, repeated, so that a large case costs no more than it must."""
    S = T if S is None else S
    scores = 3 * np.random.default_rng(0).normal(size=(1, 1, T, S)).astype(np.float32)
    if causal:
        scores = np.where(np.tril(np.ones((T, S), bool)), scores, -np.inf)
    raised = np.exp(scores - scores.max(-1, keepdims=True))
    return np.broadcast_to(raised / raised.sum(-1, keepdims=True), (L, H, T, S))


def grid(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).uniform(size=shape)


def signed(*shape: int) -> np.ndarray:
    return np.random.default_rng(2).normal(size=shape)


def log(probes: bool = False) -> list[dict]:
    events: list[dict] = [{"event": "start", "uniform": math.log(65), "baselines": {"unigram": 3.3, "bigram": 2.5}}]
    events += [{"event": "step", "step": i, "loss": 4 * math.exp(-i / 300) + 1.4} for i in range(0, 2000, 10)]
    events += [{"event": "validation", "step": i, "loss": 4 * math.exp(-i / 300) + 1.5} for i in range(0, 2001, 250)]
    if probes:
        for i in range(0, 2000, 50):
            scores = {"induction": [[0.1, None], [0.1, i / 2000]], "previous_token": [[i / 2000, 0.1], [0.0, 0.1]]}
            events.append({"event": "probe", "step": i, "heads": scores, "norms": {"total": 30.0 + i}})
    return events


def spectra(n: int, r: int) -> np.ndarray:
    return np.exp(-0.02 * np.arange(1, n + 1)[:, None] * np.arange(r)[None])


VARIANTS = {f"variant {i} of the block": np.exp(-np.arange(51) * 10.0**-i) for i in range(-1, 8)}
OFFSETS = np.arange(-64, 65)
LONG = "A title so long that it takes more than one line of a picture which is as wide as a column of text on a page"

CASES = {
    "sheet of 144 heads at 512 tokens": lambda: f.attention_sheet(pattern(12, 12, 512), words(512)),
    "sheet of 4 heads at 3 tokens": lambda: f.attention_sheet(pattern(2, 2, 3), words(3)),
    "sheet of one head at one token": lambda: f.attention_sheet(pattern(1, 1, 1), words(1)),
    "sheet of 1200 heads": lambda: f.attention_sheet(pattern(48, 25, 4), words(4), title=LONG),
    "sheet of one layer": lambda: f.attention_sheet(pattern(1, 12, 30), words(30), layers=[7]),
    "sheet of cross-attention": lambda: f.attention_sheet(pattern(3, 4, 5, 40, causal=False)),
    "head at 3 tokens": lambda: f.attention_head(pattern(1, 1, 3)[0, 0], words(3)),
    "head at 30 tokens": lambda: f.attention_head(pattern(1, 1, 30)[0, 0], words(30), title=LONG),
    "head at 2000 tokens": lambda: f.attention_head(pattern(1, 1, 2000)[0, 0], words(2000)),
    "head of cross-attention": lambda: f.attention_head(pattern(1, 1, 2, 40, causal=False)[0, 0], words(2), words(40)),
    "induction at 40 tokens": lambda: f.induction_stripe(pattern(1, 1, 40)[0, 0], [*range(20)] * 2, words(40)),
    "induction at 300 tokens": lambda: f.induction_stripe(pattern(1, 1, 300)[0, 0], [*range(150)] * 2),
    "scores of 144 heads": lambda: f.head_scores({f"score {i}": grid(12, 12) for i in range(3)} | {"none": None}),
    "scores of 4 heads": lambda: f.head_scores({f"score {i}": signed(2, 2) for i in range(3)}),
    "scores of 1024 heads": lambda: f.head_scores({"induction": grid(32, 32)}),
    "lens at 12 tokens": lambda: f.logit_lens_grid([words(12)] * 13, grid(13, 12), words(12)),
    "lens at 512 tokens": lambda: f.logit_lens_grid(
        [words(512)] * 49, grid(49, 512), words(512), quantity="entropy (nats)"
    ),
    "lens at 1 token": lambda: f.logit_lens_grid([words(1)] * 2, grid(2, 1), words(1), ["embedding", "block 0"]),
    "attribution of 157 parts": lambda: f.attribution_bars([f"head {i}" for i in range(157)], signed(157), 3.0),
    "attribution of 3 parts": lambda: f.attribution_bars(["a", "b", "c"], -grid(3) * 1e-4, -0.1, order="depth"),
    "attribution of nothing": lambda: f.attribution_bars(["a", "b"], np.zeros(2), 0.0),
    "patching by place": lambda: f.patching_map(signed(12, 14), words(14)),
    "patching of 144 heads": lambda: f.patching_map(
        signed(144, 64), words(64), [f"{i}.0" for i in range(144)], axis="head"
    ),
    "patching of 2 layers": lambda: f.patching_map(signed(2, 3), words(3), title=LONG),
    "singular values": lambda: f.singular_values(spectra(49, 64)),
    "one singular value": lambda: f.singular_values(spectra(1, 1)),
    "deviation of nine variants": lambda: f.deviation_by_depth(VARIANTS, {"rate": np.exp(-np.arange(51) * 3.0)}),
    "deviation of one": lambda: f.deviation_by_depth({"stream": 0.9 + 0.01 * grid(7)}),
    "norms": lambda: f.norms_by_depth({"stream": grid(13, 20) * 1e4 + 1, "attention": grid(12, 20) + 0.1}),
    "norms of one place": lambda: f.norms_by_depth({"stream": grid(3)}),
    "position vectors": lambda: f.position_heatmap(signed(1024, 768)),
    "one position vector": lambda: f.position_heatmap(signed(1, 2)),
    "offsets of four schemes": lambda: f.relative_offset(
        OFFSETS, {f"scheme {i}": np.outer(np.arange(1, 2 + 4 * i), OFFSETS) for i in range(4)}
    ),
    "offsets of one scheme": lambda: f.relative_offset(OFFSETS, {"ALiBi": -np.abs(OFFSETS)}),
    "training": lambda: f.training_curves(log()),
    "training with probes": lambda: f.training_curves(log(probes=True), title=LONG),
}  # fmt: skip


@functools.cache
def drawn(name: str) -> f.Figure:
    return CASES[name]()
