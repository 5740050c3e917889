"""The fixed snippet of a diagnosis page is right where the broken one is wrong, for those that can be called alone."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.docs.test_diagnosis_pages import PAGES, blocks


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def names(code: str) -> SimpleNamespace:
    space = {"torch": torch, "nn": nn, "F": F}
    exec(code, space)
    return SimpleNamespace(**space)


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, atol=1e-5)


def tril(t: int, s: int) -> Tensor:
    return torch.arange(s)[None] <= torch.arange(t)[:, None] + s - t


MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
Q = random(2, 3, 5, 4)
LOGITS, IDS = random(2, 6, 11), torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 0, 1]])
TARGETS = torch.tensor([[0, 2, 3, 4, 5, 6], [7, 8, 9, 1, 2, 3]])


def rotation_is_relative(rope: Callable[[Tensor, Tensor], Tensor]) -> bool:
    q, k, inv = random(1, 8), random(1, 8) + 1, torch.tensor([1.0, 0.3, 0.1, 0.03])
    scores = [float(rope(q, inv * (i + 3)) @ rope(k, inv * i).T) for i in (0.0, 5.0, 11.0)]
    return max(scores) - min(scores) < 1e-4


RIGHT: dict[str, Callable[[SimpleNamespace], bool]] = {
    "causal_leak": lambda n: same(n.attend(Q, Q, Q)[:, :, :1], Q[:, :, :1]),
    "softmax_axis": lambda n: same(n.attend(Q, Q, torch.ones_like(Q)), torch.ones_like(Q)),
    "attention_weights": lambda n: same(n.attend(Q, Q, Q, tril(5, 5))[:, :, :1], Q[:, :, :1]),
    "head_layout": lambda n: same(n.merge(Q)[:, 1], Q[:, :, 1].flatten(1)),
    "mask_value": lambda n: float(n.masked(torch.tensor([[-2e4, 5.0]]), torch.tensor([[True, False]]))[0, 1]) == 0,
    "mask_nan": lambda n: bool(n.attend(random(2, 2), torch.zeros(2, 2).bool(), random(2, 3)).isfinite().all()),
    "cache_mask": lambda n: torch.equal(n.causal(Q[:, :, :2], Q), tril(2, 5)),
    "over_mask": lambda n: torch.equal(n.causal(5), tril(5, 5)),
    "window": lambda n: n.visible(9, 3).sum(1).max() == 3,
    "left_pad_position": lambda n: n.positions_of(MASK)[0].tolist() == [0, 0, 0, 1],
    "batch_variance": lambda n: n.pad_mask(MASK.bool(), torch.zeros(2, 1, 4, 4))[1].isfinite().all(),
    "norm_eps": lambda n: same(n.layer_norm(LOGITS * 1e-3, 1.0, 0.0), F.layer_norm(LOGITS * 1e-3, (11,))),
    "low_precision": lambda n: float((n.weights(LOGITS) - LOGITS.softmax(-1)).abs().max()) < 1e-6,
    "decode_select": lambda n: n.next_token(LOGITS[:, :4], MASK.flip(1))[0] == LOGITS[0, 1].argmax(),
    "label_shift": lambda n: same(n.loss(LOGITS, IDS), F.cross_entropy(LOGITS[:, :-1].mT, IDS[:, 1:])),
    "loss_padding": lambda n: same(n.loss(LOGITS, TARGETS), F.cross_entropy(LOGITS.flatten(0, 1), TARGETS.flatten())),
    "rope_pairing": lambda n: rotation_is_relative(n.rope),
    "rope_relative": lambda n: same(n.angles_of(torch.tensor([1001]), 4)[0].float(), torch.tensor([1001.0, 10.01])),
    "activation": lambda n: same(
        n.feed_forward(LOGITS, nn.Identity(), nn.Identity()), F.gelu(LOGITS, approximate="tanh")
    ),
    "weight_tying": lambda n: len(list(n.LM(7, 4).parameters())) == 1,
    "dead_gradient": lambda n: len(list(n.Model(2, 4).parameters())) == 4,
    "layer_reuse": lambda n: len(list(n.Stack(3, 4).parameters())) == 6,
    "init_loss": lambda n: float(n.head.weight.detach().std()) < 0.03,
}


@pytest.mark.parametrize("name", RIGHT)
def test_the_fixed_snippet_is_right_and_the_broken_one_is_not(name):
    broken, fixed = (names(b.text) for b in blocks(PAGES[name]) if b.language == "python")
    assert RIGHT[name](fixed)
    assert not RIGHT[name](broken)


@pytest.mark.parametrize("name", PAGES)
def test_every_snippet_can_be_defined(name):
    for block in blocks(PAGES[name]):
        if block.language == "python":
            names(block.text)
