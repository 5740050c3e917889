"""The induction circuit, constructed with integer weights and evaluated without rounding.

Two attention layers with one head each (Elhage et al. 2021; Olsson et al. 2022) continue `... A B ... A` with B:

    head 1  previous token: h_t = x_{t-1} W_OV1, added to the residual stream: r_t = x_t + h_t
    head 2  query q_t = r_t W_Q2, key k_s = r_s W_K2; it attends to the positions whose predecessor is the current token
            and copies the tokens at these positions

The score of head 2 is a sum of four terms. The match is the third: the *key* reads the output of head 1.

    x_t W_Q2 (x_s W_K2)^T    direct
    h_t W_Q2 (x_s W_K2)^T    Q-composition
    x_t W_Q2 (h_s W_K2)^T    K-composition
    h_t W_Q2 (h_s W_K2)^T    QK-composition

After a BOS token the output is the empirical distribution of the continuations of the current token. Without BOS, the
first token attends to itself in head 1: it counts as its own predecessor, and A B A gives (1/2, 1/2).
"""

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from glassformer import config as c
from glassformer.errors import listing
from glassformer.lens.sites import LensError
from glassformer.model import DecoderLM, build

Term = Literal["direct", "q", "k", "qk"]
TERMS: tuple[Term, ...] = get_args(Term)
Integers = NDArray[np.int64]
Exact = list[Fraction]


@dataclass(frozen=True)
class Circuit:
    """The weights of the circuit.

    The residual stream has four slots: token (V + 1, the last is BOS), position (P), previous token, next token.
    Vectors are rows: x_t = tokens[id] + positions[t], and a layer computes x W.
    """

    n_tokens: int
    max_len: int
    e_beta: int = 10**6
    """e^β of head 2: the weight of a match relative to a mismatch. It is an integer, so the softmax is rational."""

    def __post_init__(self) -> None:
        for name, least in (("n_tokens", 1), ("max_len", 1), ("e_beta", 2)):
            if getattr(self, name) < least:
                raise LensError(f"{name}={getattr(self, name)} must be at least {least}.")

    @property
    def bos(self) -> int:
        return self.n_tokens

    @property
    def width(self) -> int:
        return 3 * (self.n_tokens + 1) + self.max_len

    def slot(self, name: Literal["token", "position", "previous", "next"]) -> Integers:
        """Return the rows of the identity matrix that span a slot, (size, width)."""
        one_hot = self.n_tokens + 1
        starts = {"token": 0, "position": one_hot, "previous": one_hot + self.max_len}
        start = starts.get(name, 2 * one_hot + self.max_len)
        size = self.max_len if name == "position" else one_hot
        return np.eye(self.width, dtype=np.int64)[start : start + size]

    @property
    def qk1(self) -> Integers:
        """x_t W_QK1 x_s^T = 1 where s = t - 1, else 0."""
        position = self.slot("position")
        return position.T @ np.eye(self.max_len, k=-1, dtype=np.int64) @ position

    @property
    def ov1(self) -> Integers:
        """Copies the token into the slot of the previous token."""
        return self.slot("token").T @ self.slot("previous")

    @property
    def q2(self) -> Integers:
        """Reads the current token."""
        return self.slot("token").T

    @property
    def k2(self) -> Integers:
        """Reads the previous token, the output of head 1."""
        return self.slot("previous").T

    @property
    def ov2(self) -> Integers:
        """Copies the token into the slot that the output reads."""
        return self.slot("token").T @ self.slot("next")


@dataclass(frozen=True)
class Run:
    """One evaluation on T tokens, including BOS if there is one. All numbers are exact."""

    tokens: tuple[int, ...]
    pattern1: Integers
    """(T,T): the pattern of head 1 in the limit β → ∞, where its weights are 0 and 1."""
    terms: dict[Term, Integers]
    """(T,T) each: the terms of head 2's score in units of β, without the deleted ones."""
    pattern2: list[Exact]
    """Rows t over keys s ≤ t: softmax of β times the sum of the terms."""
    output: list[Exact]
    """Rows t over the V tokens and BOS: what head 2 copies."""

    @property
    def scores(self) -> Integers:
        return sum(self.terms.values(), np.zeros_like(self.pattern1))


def score_terms(x: Integers, h: Integers, w_q: Integers, w_k: Integers) -> dict[Term, Integers]:
    """Return the terms of the score (x + h) W_Q ((x + h) W_K)^T."""
    return {
        "direct": x @ w_q @ (x @ w_k).T,
        "q": h @ w_q @ (x @ w_k).T,
        "k": x @ w_q @ (h @ w_k).T,
        "qk": h @ w_q @ (h @ w_k).T,
    }


def run(circuit: Circuit, tokens: Sequence[int], bos: bool = True, without: Collection[Term] = ()) -> Run:
    """Run the circuit on tokens 0 to V - 1, with or without BOS, with some terms of head 2's score deleted.

    Head 1 uses the limit of infinite β, so its output and every score of head 2 are integers. A finite β would put
    irrational weights e^{β·fraction} into head 2. `as_model` uses a finite β.
    """
    if unknown := set(without) - set(TERMS):
        raise LensError(f"there is no term {sorted(unknown)[0]!r} to delete: use {listing(list(TERMS))}.")
    ids = _checked(circuit, tokens, bos)
    x = circuit.slot("token")[list(ids)] + circuit.slot("position")[: len(ids)]
    pattern1 = _hard_attention(x @ circuit.qk1 @ x.T)
    h = pattern1 @ x @ circuit.ov1
    terms = {
        name: value for name, value in score_terms(x, h, circuit.q2, circuit.k2).items() if name not in set(without)
    }
    scores = sum(terms.values(), np.zeros_like(pattern1))
    pattern2 = [_rational_softmax(scores[t, : t + 1], circuit.e_beta) for t in range(len(ids))]
    copied = ((x + h) @ circuit.ov2 @ circuit.slot("next").T).tolist()
    output = [
        [sum((a * copied[s][v] for s, a in enumerate(row)), Fraction(0)) for v in range(circuit.n_tokens + 1)]
        for row in pattern2
    ]
    return Run(ids, pattern1, terms, pattern2, output)


def _hard_attention(scores: Integers) -> Integers:
    """Return the causal softmax of β · scores for β → ∞: each row has one maximum, which gets all the weight."""
    pattern = np.zeros_like(scores)
    for t, row in enumerate(scores):
        best = np.flatnonzero(row[: t + 1] == row[: t + 1].max())
        assert len(best) == 1, "head 1 has a tie"
        pattern[t, best] = 1
    return pattern


def _rational_softmax(scores: Integers, e_beta: int) -> Exact:
    weights = [Fraction(e_beta) ** int(score) for score in scores]
    total = sum(weights, Fraction(0))
    return [w / total for w in weights]


def continuations(
    tokens: Sequence[int], n_tokens: int, bos: bool = True, without: Collection[Term] = (), e_beta: int = 10**6
) -> Exact:
    """Return the circuit's exact distribution over the V tokens and BOS after the last token."""
    return run(Circuit(n_tokens, len(tokens) + 1, e_beta), tokens, bos, without).output[-1]


def empirical(tokens: Sequence[int], n_tokens: int) -> Exact | None:
    """Return how often each of the V tokens and BOS followed the last token so far, as fractions; None if it is new."""
    followers = [b for a, b in itertools.pairwise(tokens) if a == tokens[-1]]
    if not followers:
        return None
    return [Fraction(followers.count(v), len(followers)) for v in range(n_tokens + 1)]


def census(
    n_tokens: int = 3,
    longest: int = 6,
    bos: bool = True,
    without: Collection[Term] = (),
    tolerance: Fraction = Fraction(1, 1000),
) -> tuple[int, int]:
    """Return (matches, sequences) over all sequences up to a length whose last token occurred before.

    A sequence matches if the circuit gives the empirical distribution to within `tolerance` in each entry.
    """
    matches = total = 0
    for length in range(1, longest + 1):
        circuit = Circuit(n_tokens, length + 1)
        for tokens in itertools.product(range(n_tokens), repeat=length):
            wanted = empirical(tokens, n_tokens)
            if wanted is None:
                continue
            given = run(circuit, tokens, bos, without).output[-1]
            matches += all(abs(a - b) <= tolerance for a, b in zip(given, wanted, strict=True))
            total += 1
    return matches, total


def _checked(circuit: Circuit, tokens: Sequence[int], bos: bool) -> tuple[int, ...]:
    ids = (circuit.bos, *tokens) if bos else tuple(tokens)
    if not tokens or len(ids) > circuit.max_len:
        raise LensError(
            f"{len(ids)} tokens{' with BOS' if bos else ''} do not fit the circuit's {circuit.max_len} positions: "
            f"give 1 to {circuit.max_len - bos}."
        )
    for token in tokens:
        if not 0 <= token < circuit.n_tokens:
            raise LensError(f"token {token} is outside the circuit's vocabulary: use 0 to {circuit.n_tokens - 1}.")
    return tuple(int(token) for token in ids)


@torch.no_grad()
def as_model(n_tokens: int, max_len: int, e_beta: int = 10**6, dtype: torch.dtype = torch.float64) -> DecoderLM:
    """Return the circuit as a DecoderLM: two attention-only blocks with one head, learned positions, BOS is token V.

    Both heads use the finite β = ln(e_beta). RMSNorm divides by the norm of the residual stream, which is √2 before
    head 1 and √3 before head 2 for every token; the weights compensate for it. The logits are a positive multiple of
    the output of head 2, so they rank the continuations as the circuit does.
    """
    circuit = Circuit(n_tokens, max_len, e_beta)
    V, D = n_tokens + 1, circuit.width
    config = c.DecoderConfig(
        vocab_size=V,
        d_model=D,
        n_layers=2,
        attention=c.Attention(1, d_head=max(V, max_len), d_value=V, scale=math.log(e_beta), bias=False),
        feedforward=c.NoFeedForward(),
        norm=c.RMSNorm(eps=1e-30),
        head=c.Head(tied=False),
        max_len=max_len,
        special=c.Special(bos=circuit.bos),
    )
    token, position, previous, following = (
        torch.from_numpy(circuit.slot(name)).to(dtype) for name in ("token", "position", "previous", "next")
    )
    earlier = torch.from_numpy(np.eye(max_len, k=1)).to(dtype) @ position
    model = build(config, dtype=dtype)
    assert isinstance(model, DecoderLM)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.zero_()
    model.embed.tokens.weight.copy_(token)
    model.decoder.get_parameter("position.weight").copy_(position)
    reads = (earlier, position, token, previous), (token, previous, token, following)
    for block, length, (q, k, v, o) in zip(model.blocks, (2, 3), reads, strict=True):
        unit = math.sqrt(length / D)  # cancels the norm's factor √(D / norm)
        for weight, rows in (("q", q), ("k", k), ("v", v)):
            block.get_parameter(f"attention.{weight}.weight")[: len(rows)] = unit * rows
        block.get_parameter("attention.o.weight").copy_(o.T)
    assert model.head is not None
    assert model.head.weight is not None
    model.head.weight.copy_(math.log(e_beta) * following)
    return model
