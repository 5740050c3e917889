"""From logits to the next token: pure functions, each on (B,V) logits, chained by `distribution`.

The order is fixed: repetition penalty, temperature, top-k, top-p, min-p; each works on what the one before it left,
renormalised. Removed tokens get -inf. Randomness enters as one uniform number per sequence (`draw`), so the same
numbers give the same tokens on every device and in every batch.
"""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from glassformer.config import ConfigError
from glassformer.generation import host
from glassformer.shapes import Bool, Float, Int


@dataclass(frozen=True)
class Sampling:
    """How to pick a token. The defaults sample from the model's own distribution; temperature 0 is greedy."""

    temperature: float = 1.0
    """Logits are divided by it: below 1 sharpens, above 1 flattens, 0 takes the most likely token. Default: 1."""
    top_k: int | None = None
    """Keep the k most likely tokens, and any that tie with the k-th. None and 0 keep all tokens. Default: None.

    On a GPU, at most 64 more tokens are kept because they tie.
    """
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probabilities reach p; 1 keeps all tokens. Default: 1."""
    min_p: float = 0.0
    """Keep tokens with at least this fraction of the largest probability; 0 keeps all tokens. Default: 0."""
    repetition_penalty: float = 1.0
    """Divide positive and multiply negative logits of tokens already in the sequence; 1 is off. Default: 1."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be 0 (greedy) or a positive number.")
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 0):
            raise ValueError(f"top_k={self.top_k} must be a whole number of at least 1, or 0 to keep all tokens.")
        if self.top_k == 0:
            object.__setattr__(self, "top_k", None)  # one value for "off", so that equal samplings compare equal
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be in (0, 1]; 1 keeps all tokens.")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must be in [0, 1]; 0 keeps all tokens.")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be positive; 1 changes nothing.")


GREEDY = Sampling(temperature=0.0)
TIED = 64
"""Most tokens beyond the k-th that are kept because they tie with it, where NumPy cannot read the logits.

A GPU would have to wait until the number of tokens with ties is known.
"""
FEW = 4
"""A vocabulary with this many times as many tokens as are kept is reduced to them before it is filtered further."""
LARGE = 1024
"""Tokens of a vocabulary from which the functions of `host` are faster than these filters."""


def penalize(logits: Float[Tensor, "B V"], seen: Bool[Tensor, "B V"], penalty: float) -> Float[Tensor, "B V"]:
    """Make tokens already seen less likely: l / penalty where l > 0, l * penalty where l < 0. Keskar et al. 2019."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def _penalized(logits: Float[Tensor, "B V"], seen: Bool[Tensor, "B V"], penalty: float) -> Float[Tensor, "B V"]:
    if not _is_readable(logits):
        return penalize(logits, seen, penalty)
    at = seen.nonzero(as_tuple=True)  # a GPU would wait for their number
    return logits.index_put(at, penalize(logits[at][None], seen[at][None], penalty)[0])


def keep_top_k(logits: Float[Tensor, "B V"], k: int) -> Float[Tensor, "B V"]:
    """Remove everything below the k-th largest logit; ties with it stay."""
    if k >= logits.shape[-1]:
        return logits
    return logits.masked_fill(logits < logits.topk(k).values[:, -1:], float("-inf"))


def keep_top_p(logits: Float[Tensor, "B V"], p: float) -> Float[Tensor, "B V"]:
    """Nucleus: keep the most likely tokens (ties: lowest id first) until they sum to p. Holtzman et al. 2020."""
    if p >= 1:
        return logits
    ordered, order = logits.sort(descending=True, stable=True)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities  # total probability of all more likely tokens
    dropped = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before >= p)
    return logits.masked_fill(dropped, float("-inf"))


def keep_min_p(logits: Float[Tensor, "B V"], min_p: float) -> Float[Tensor, "B V"]:
    """Remove tokens with less than min_p times the largest probability."""
    if min_p <= 0:
        return logits
    probabilities = logits.softmax(-1)
    return logits.masked_fill(probabilities < min_p * probabilities.amax(-1, keepdim=True), float("-inf"))


def distribution(
    logits: Float[Tensor, "B V"], sampling: Sampling, seen: Bool[Tensor, "B V"] | None = None
) -> Float[Tensor, "B V"]:
    """Return the exact probabilities of the next token, float64. Temperature 0: 1 for the largest logit, lowest id."""
    if seen is not None and sampling.repetition_penalty != 1:
        logits = _penalized(logits.to(torch.float64), seen, sampling.repetition_penalty)
    if sampling.temperature and _is_served_by_host(logits):
        return host.distribution(logits, sampling)
    logits = logits.to(torch.float64)
    if sampling.temperature == 0:
        best = logits == logits.amax(-1, keepdim=True)
        first = best & (best.cumsum(-1) == 1)
        return first.to(torch.float64)
    logits = logits / sampling.temperature
    if sampling.top_k is not None:
        logits = keep_top_k(logits, sampling.top_k)
    logits = keep_top_p(logits, sampling.top_p)
    logits = keep_min_p(logits, sampling.min_p)
    return logits.softmax(-1)


def draw(probabilities: Float[Tensor, "B V"], uniform: Float[Tensor, "B"]) -> Int[Tensor, "B"]:
    """Return the first token, in order of ids, whose cumulative probability exceeds uniform * total; uniform < 1."""
    total = probabilities.cumsum(-1)
    threshold = uniform.to(total)[:, None] * total[:, -1:]
    return torch.searchsorted(total, threshold, right=True)[:, 0]


def checked(logits: Float[Tensor, "B V"], tokens: Int[Tensor, "B"]) -> list[int]:
    """Return chosen tokens as a list, in one transfer from the device.

    Tokens that were chosen from logits with NaN are refused: argmax returns the NaN, and a draw an id past the last.
    """
    found: list[int] = _marked_on_host(logits, tokens) if _is_readable(logits) else marked(logits, tokens).tolist()
    refuse_marked(found)
    return found


def marked(logits: Float[Tensor, "B V"], tokens: Int[Tensor, "B"]) -> Int[Tensor, "B"]:
    """Return chosen tokens, -1 for each that was chosen from logits with NaN. The host does not wait for it."""
    last = logits.shape[-1] - 1
    picked = logits.gather(1, tokens.clamp(max=last)[:, None])[:, 0]
    return torch.where(picked.isnan() | (tokens > last), -1, tokens)


def _marked_on_host(logits: Float[Tensor, "B V"], tokens: Int[Tensor, "B"]) -> list[int]:
    rows = zip(logits.numpy(), tokens.tolist(), strict=True)
    return [token if token < len(row) and row[token] == row[token] else -1 for row, token in rows]


def _is_readable(logits: Float[Tensor, "B V"]) -> bool:
    """Return whether NumPy can read these logits: it finds the largest one ten times as fast as torch."""
    is_known = logits.dtype in (torch.float32, torch.float64)
    return is_known and logits.device.type == "cpu" and not logits.requires_grad


def _is_served_by_host(logits: Float[Tensor, "B V"]) -> bool:
    return logits.shape[-1] >= LARGE and _is_readable(logits)


def refuse_marked(tokens: list[int]) -> None:
    if min(tokens) < 0:
        raise ConfigError("the model's logits are not all numbers: look for NaN in its weights, or use a wider dtype.")


def choose(
    logits: Float[Tensor, "B V"],
    sampling: Sampling,
    uniform: Float[Tensor, "B"] | None,
    seen: Bool[Tensor, "B V"] | None = None,
) -> Int[Tensor, "B"]:
    """Return the next token of every sequence. A temperature of 0 needs no uniform numbers."""
    if seen is not None and sampling.repetition_penalty != 1:
        logits = _penalized(logits.to(torch.float64), seen, sampling.repetition_penalty)
    if sampling.temperature == 0:
        return torch.from_numpy(logits.numpy().argmax(-1)) if _is_readable(logits) else logits.argmax(-1)
    assert uniform is not None
    if _is_served_by_host(logits):
        return host.choose(logits, sampling, uniform)
    k, size = sampling.top_k, logits.shape[-1]
    if k is None or FEW * (k + TIED) > size:
        return draw(distribution(logits, sampling), uniform)
    ids, logits = _most_likely(logits, k)
    index = draw(distribution(logits, dataclasses.replace(sampling, top_k=None)), uniform)
    last = ids.shape[-1] - 1
    return torch.where(index > last, size, ids.gather(1, index.clamp(max=last)[:, None])[:, 0])


def _most_likely(logits: Float[Tensor, "B V"], k: int) -> tuple[Int[Tensor, "B N"], Float[Tensor, "B N"]]:
    """Return ids, in order, and logits of the k most likely tokens and of TIED more, which are -inf unless they tie."""
    values, ids = logits.topk(k + TIED)
    values = values.masked_fill(values < values[:, k - 1 : k], float("-inf"))
    ids, order = ids.sort(-1)
    return ids, values.gather(-1, order)
