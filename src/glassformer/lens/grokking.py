"""Grokking on modular addition: a network that memorises first and generalises later, and its Fourier structure.

`grok` trains a small network that shows it: a one-hot pair (a, b), a hidden layer of quadratic units, and logits over
the p answers,

    logits = (x W_1)^2 W_2,   x the concatenated one-hots of a and b, W_1 (2p, F), W_2 (F, p), no biases,

with all training pairs in every step, cross-entropy and AdamW. Squares of sums contain products of two cosines, so the
network can add angles: cos(w a) cos(w b) - sin(w a) sin(w b) = cos(w (a + b)). `fourier` shows which frequencies
w = 2 pi k / p an embedding uses. `compact_circuit` is the algorithm, written out. Sources: Power et al. 2022; Nanda et
al. 2023; Gromov 2023 (quadratic units).
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.lens.sites import LensError
from glassformer.model import Model
from glassformer.shapes import Float


@dataclass(frozen=True)
class GrokRun:
    """Curves of one run, one entry per logged step, and the final weights."""

    p: int
    weight_decay: float
    seed: int
    steps: list[int]
    train_accuracy: list[float]
    test_accuracy: list[float]
    train_loss: list[float]
    test_loss: list[float]
    norm: list[float]
    """Euclidean norm of all weights together."""
    embedding: Float[Tensor, "P2 F"]
    """W_1: rows 0 to p - 1 read a, the others b."""
    readout: Float[Tensor, "F P"]
    """W_2."""

    def first(self, curve: str, at_least: float) -> int | None:
        """Return the first logged step at which a curve (for example `test_accuracy`) reaches a value, or None."""
        values: list[float] = getattr(self, curve)
        return next((step for step, value in zip(self.steps, values, strict=True) if value >= at_least), None)

    @property
    def peak_norm(self) -> float:
        return max(self.norm)

    def to_dict(self) -> dict[str, Any]:
        """Return the curves as plain values, without the weights."""
        curves = ("steps", "train_accuracy", "test_accuracy", "train_loss", "test_loss", "norm")
        return {name: getattr(self, name) for name in ("p", "weight_decay", "seed", *curves)}


def grok(
    p: int = 31,
    wd: float = 0.5,
    steps: int = 3000,
    seed: int = 0,
    *,
    fraction: float = 0.5,
    width: int = 128,
    lr: float = 5e-3,
    scale: float = 3.0,
    log_every: int = 50,
) -> GrokRun:
    """Train on a random half of the p^2 pairs and test on the other half; about 4 seconds on one core by default.

    Initial weights are `scale` N(0, 1/fan-in). The optimizer is AdamW with betas (0.9, 0.98) and weight decay `wd`.
    """
    if p < 3 or steps < 1 or width < 1 or log_every < 1 or not 0 < fraction < 1 or wd < 0:
        raise LensError(
            f"p={p}, steps={steps}, width={width}, log_every={log_every}, fraction={fraction}, wd={wd}: p must be at "
            "least 3, counts at least 1, the fraction between 0 and 1 and the decay not negative."
        )
    generator = torch.Generator().manual_seed(seed)
    order, n = torch.randperm(p * p, generator=generator), int(fraction * p * p)
    a, b = order // p, order % p
    answer = (a + b) % p
    pairs = torch.cat([F.one_hot(a, p), F.one_hot(b, p)], 1).float()
    first = (torch.randn(2 * p, width, generator=generator) * (scale / math.sqrt(2 * p))).requires_grad_()
    last = (torch.randn(width, p, generator=generator) * (scale / math.sqrt(width))).requires_grad_()
    optimizer = torch.optim.AdamW([first, last], lr=lr, betas=(0.9, 0.98), weight_decay=wd, fused=True)
    curves: dict[str, list[float]] = {
        name: [] for name in ("train_accuracy", "test_accuracy", "train_loss", "test_loss", "norm")
    }
    logged = []
    for step in range(steps + 1):
        if step % log_every == 0 or step == steps:
            logged.append(step)
            for name, value in _measure(first, last, pairs, answer, n).items():
                curves[name].append(value)
        if step < steps:
            optimizer.zero_grad()
            F.cross_entropy(quadratic(pairs[:n], first, last), answer[:n]).backward()
            optimizer.step()
    return GrokRun(p, wd, seed, logged, **curves, embedding=first.detach(), readout=last.detach())


def quadratic(
    x: Float[Tensor, "N P2"], first: Float[Tensor, "P2 F"], last: Float[Tensor, "F P"]
) -> Float[Tensor, "N P"]:
    """(x W_1)^2 W_2."""
    return (x @ first).square() @ last


@torch.no_grad()
def _measure(first: Tensor, last: Tensor, pairs: Tensor, answer: Tensor, n: int) -> dict[str, float]:
    logits = quadratic(pairs, first, last)
    right = (logits.argmax(1) == answer).double()
    losses = F.cross_entropy(logits, answer, reduction="none").double()
    return {
        "train_accuracy": float(right[:n].mean()),
        "test_accuracy": float(right[n:].mean()),
        "train_loss": float(losses[:n].mean()),
        "test_loss": float(losses[n:].mean()),
        "norm": float((first.double().square().sum() + last.double().square().sum()).sqrt()),
    }


@dataclass(frozen=True)
class Spectrum:
    """The distribution of the energy of p vectors over the frequencies of Z/p."""

    power: Float[Tensor, "K"]
    """Share of frequency k = 0 .. p // 2 (k = 0 is the mean over tokens); the shares sum to 1."""
    columns: Float[Tensor, "D K"]
    """The same for each column, as shares of the total energy; all entries together sum to 1."""
    key: list[int]
    """The frequencies above `threshold` times the uniform share, strongest first; the mean is never included."""

    @property
    def share(self) -> float:
        """Return the share of the energy without the mean that lies on the key frequencies."""
        varying = float(self.power[1:].sum())
        return float(self.power[self.key].sum()) / varying if varying > 0 and self.key else 0.0

    @property
    def concentration(self) -> float:
        """Return the share of the energy without the mean that lies on each column's own strongest frequency.

        It is 1 if every unit is a pure wave of any frequency, and about 0.22 for random columns and p = 31. A network
        can use all frequencies and still have pure units; `share` does not show this, but `concentration` does.
        """
        varying = self.columns[:, 1:]
        return float(varying.amax(1).sum() / varying.sum()) if float(varying.sum()) > 0 else 0.0

    @property
    def effective(self) -> float:
        """Return the effective number of frequencies: exp of the entropy of the energy without the mean."""
        q = self.power[1:] / self.power[1:].sum()
        return float(torch.special.entr(q).sum().exp())


def fourier(vectors: Float[Tensor, "P D"], threshold: float = 1.5) -> Spectrum:
    """Return the spectrum of a function on Z/p: row c of `vectors` is its value at c, each column is one component.

    x_k = sum_c vectors_c e^(-2 pi i k c / p). k and p - k are one frequency (its cosine and its sine) and are counted
    together. By Parseval's theorem the powers sum to p times the squared norm of the vectors; they are given as shares.
    """
    p = vectors.shape[0]
    columns = torch.fft.rfft(vectors.double(), dim=0).abs().square().T  # (D, K)
    columns[:, 1:] *= 2
    if p % 2 == 0:
        columns[:, -1] /= 2  # p/2 and p - p/2 are the same frequency
    if float(columns.sum()) == 0:
        raise LensError("vectors that are all zero have no spectrum: give a trained embedding.")
    columns = columns / columns.sum()
    power = columns.sum(0)
    even = float(power[1:].sum()) / max(p // 2, 1)
    strong = [k for k in range(1, p // 2 + 1) if float(power[k]) > threshold * even]
    return Spectrum(power, columns, sorted(strong, key=lambda k: -float(power[k])))


def fourier_of_embedding(model: Model, p: int, threshold: float = 1.5) -> Spectrum:
    """Return the spectrum of a Transformer's token embedding over its first p tokens, the numbers 0 to p - 1."""
    table = model.embed.tokens.weight.detach()
    if not 3 <= p <= table.shape[0]:
        raise LensError(
            f"p={p} must be at least 3 and at most the {table.shape[0]} tokens of this model: give the modulus it was "
            "trained with."
        )
    return fourier(table[:p], threshold)


def compact_circuit(p: int, frequencies: list[int] | None = None) -> np.ndarray:
    """Return logits[a, b, c] = sum_k cos(2 pi k (a + b - c) / p), (p,p,p), over `frequencies`, default 1 .. (p - 1)/2.

    Only the residue (a + b - c) mod p matters, so the cosine is looked up by the integer k (a + b - c) mod p and no
    angle is large.
    """
    chosen = list(range(1, (p - 1) // 2 + 1)) if frequencies is None else frequencies
    if p < 3 or not chosen or any(k % p == 0 for k in chosen):
        raise LensError(f"p={p} with frequencies {chosen} makes no circuit: p from 3 on, and frequencies not 0 mod p.")
    waves = np.cos(2 * np.pi * np.arange(p) / p)
    n = np.arange(p)
    residue = (n[:, None, None] + n[None, :, None] - n[None, None, :]) % p
    return sum((waves[k * residue % p] for k in chosen), np.zeros((p, p, p)))


@dataclass(frozen=True)
class CircuitCheck:
    """The result of the circuit on all p^2 inputs."""

    p: int
    right: int
    """Number of inputs whose unique highest logit is a + b mod p."""
    smallest_margin: float
    """Smallest difference between the correct logit and the next one."""
    largest_margin: float


def check_circuit(p: int, frequencies: list[int] | None = None) -> CircuitCheck:
    """Check for every pair whether a + b mod p has the unique highest logit, and by which margin.

    With all k = 1 .. (p - 1)/2 and p odd, the logit of a wrong answer is sum_k cos(2 pi k r / p) = -1/2 (the p-th roots
    of unity sum to 0), and the correct one is (p - 1)/2: the margin is p/2 for every pair. For p prime, any non-empty
    set of frequencies has its only maximum at r = 0, since k r = 0 mod p only there.
    """
    logits = compact_circuit(p, frequencies)
    n = np.arange(p)
    answer = (n[:, None] + n[None, :]) % p
    right = np.take_along_axis(logits, answer[..., None], -1)[..., 0]
    others = logits.copy()
    np.put_along_axis(others, answer[..., None], -np.inf, -1)
    margins = right - others.max(-1)
    # cosines that are equal in exact arithmetic may differ in the last digits
    return CircuitCheck(p, int((margins > 1e-9).sum()), float(margins.min()), float(margins.max()))
