"""Shifts, padding and ends of texts among the targets."""

import torch

from glassformer.doctor.training.listen import Forward, Update
from glassformer.doctor.training.targets import end_is_learned, label_shift, padding_targets, share
from glassformer.finding import Verdict


def forward(tokens, targets, mask=None):
    """A forward pass whose logits are trained towards these targets; -100 is not trained."""
    logits = torch.zeros(*targets.shape, 11)
    gradient = torch.zeros_like(logits)
    for place in (targets != -100).nonzero().tolist():
        gradient[tuple(place)] = 1 / 11
        gradient[(*place, int(targets[tuple(place)]))] -= 1
    return Forward(tokens, True, mask, logits=logits, gradient=gradient)


TOKENS = torch.tensor([[3, 5, 2, 9, 4, 8, 1, 0, 0]])
NEXT = torch.tensor([[5, 2, 9, 4, 8, 1, -100, -100, -100]])


def test_the_share_of_each_shift():
    seen = [forward(TOKENS, NEXT)]
    assert (share(seen, 1), share(seen, 0)) == (1.0, 0.0)
    assert label_shift(Update(seen), "decoder").passed
    assert label_shift(Update(seen), "encoder").verdict is Verdict.SKIP
    assert label_shift(Update([forward(TOKENS, TOKENS)]), "decoder").verdict is Verdict.FAIL


def test_tokens_that_repeat_say_nothing():
    same = torch.full((1, 6), 4)
    assert label_shift(Update([forward(same, same)]), "decoder").verdict in (Verdict.SKIP, Verdict.PASS)
    other = torch.tensor([[7, 7, 6, 6, 9, 10]])
    assert label_shift(Update([forward(torch.tensor([[1, 2, 3, 4, 5, 0]]), other)]), "decoder").verdict is Verdict.SKIP


def test_the_first_padding_may_be_learned_as_an_end_and_others_may_not():
    once = NEXT.clone()
    once[0, 6] = 0
    twice = once.clone()
    twice[0, 7] = 0
    assert padding_targets(Update([forward(TOKENS, once)]), pad=0).passed
    assert padding_targets(Update([forward(TOKENS, twice)]), pad=0).verdict is Verdict.FAIL
    assert padding_targets(Update([forward(TOKENS, twice)]), pad=None).verdict is Verdict.SKIP


def test_an_end_that_is_never_a_target():
    assert end_is_learned(Update([forward(TOKENS, NEXT)]), end=1).passed
    masked = torch.where(NEXT == 1, -100, NEXT)
    assert end_is_learned(Update([forward(TOKENS, masked)]), end=1).verdict is Verdict.FAIL
    few = masked.clone()
    few[0, :4] = -100
    assert end_is_learned(Update([forward(TOKENS, few)]), end=1).verdict is Verdict.SKIP
