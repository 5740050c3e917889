"""Direct measurements on one model, used by the tests of the base models, of the zoo and of the healthy ward.

Each returns a largest absolute difference: 0 up to rounding where the property holds. They know the spelling of base.py
and nothing of the doctor.
"""

import torch
from torch import Tensor, nn


def rows(n: int, length: int, vocab: int = 97, seed: int = 1) -> Tensor:
    """Random tokens; 0, 1 and 2 are left out, since some models give them a meaning."""
    return torch.randint(3, vocab, (n, length), generator=torch.Generator().manual_seed(seed))


def vocabulary(model: nn.Module) -> int:
    config = model.config
    return config["vocab_size"] if isinstance(config, dict) else config.vocab_size


def gap(a: Tensor, b: Tensor) -> float:
    """Largest difference; not-a-number counts as infinitely far."""
    return float((a.double() - b.double()).abs().nan_to_num(nan=float("inf")).max())


def steps(model: nn.Module, idx: Tensor, sizes: list[int], cache: object = None, **first: Tensor) -> Tensor:
    """Logits of idx fed through a cache in chunks of these sizes (the last is repeated)."""
    cache, parts, at = model.new_cache() if cache is None else cache, [], 0
    while at < idx.shape[1]:
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        logits, cache = model(idx[:, at : at + size], cache=cache, **(first if at == 0 else {}))
        parts.append(logits)
        at += size
    return torch.cat(parts, 1)


@torch.no_grad()
def future(model: nn.Module, length: int = 24, batch: int = 2, **also: Tensor) -> float:
    """How far logits move when only later tokens change."""
    idx, vocab = rows(batch, length, vocabulary(model)), vocabulary(model)
    before, worst = model(idx, **also), 0.0
    for cut in (1, length // 2, length - 1):
        other = idx.clone()
        other[:, cut:] = 3 + (other[:, cut:] + 5) % (vocab - 3)
        worst = max(worst, gap(model(other, **also)[:, :cut], before[:, :cut]))
    return worst


@torch.no_grad()
def cached(model: nn.Module, length: int = 24, batch: int = 2, sizes: tuple[int, ...] = (5, 1)) -> float:
    """How far logits through the cache are from one full pass."""
    idx = rows(batch, length, vocabulary(model))
    return gap(steps(model, idx, list(sizes)), model(idx))


def pads(length: int, numbers: list[int], side: str) -> Tensor:
    """(B,T) attention mask with numbers[b] padding places on one side."""
    index, n = torch.arange(length)[None], torch.tensor(numbers)[:, None]
    return (index >= n if side == "left" else index < length - n).long()


@torch.no_grad()
def padded(model: nn.Module, side: str = "left", numbers: tuple[int, ...] = (0, 3, 6), length: int = 14) -> float:
    """How far the real tokens of a padded batch are from each row alone."""
    idx, mask = rows(len(numbers), length, vocabulary(model)), pads(length, list(numbers), side)
    together, worst = model(idx, attention_mask=mask), 0.0
    for row, real in enumerate(mask.bool()):
        worst = max(worst, gap(together[row, real], model(idx[row : row + 1, real])[0]))
    return worst


@torch.no_grad()
def pad_content(model: nn.Module, side: str = "left", length: int = 14) -> float:
    """How far the real tokens move when only the padding's ids change."""
    idx, mask = rows(2, length, vocabulary(model)), pads(length, [4, 2], side)
    other = torch.where(mask.bool(), idx, rows(2, length, vocabulary(model), seed=9))
    real = mask.bool()
    return gap(model(idx, attention_mask=mask)[real], model(other, attention_mask=mask)[real])


@torch.no_grad()
def shifted(model: nn.Module, by: int = 37, length: int = 24) -> float:
    """How far logits move when every position moves by the same amount: nothing for relative schemes."""
    idx, place = rows(2, length, vocabulary(model)), torch.arange(length)[None]
    return gap(model(idx, positions=place), model(idx, positions=place + by))


@torch.no_grad()
def neighbours(model: nn.Module, length: int = 13) -> float:
    """How far a row moves when only the other rows change."""
    idx = rows(3, length, vocabulary(model))
    other = idx.clone()
    other[1:] = rows(2, length, vocabulary(model), seed=8)
    return gap(model(idx)[0], model(other)[0])


@torch.no_grad()
def repeated(model: nn.Module, length: int = 40, calls: int = 5) -> float:
    """How far calls with the same input are from the first."""
    idx = rows(2, length, vocabulary(model))
    first = model(idx)
    return max(gap(first, model(idx)) for _ in range(calls))
