"""A step that is not sound stops before the optimiser, and says what was wrong where."""

import math

import pytest
import torch

from glassformer.training.health import NonFinite
from glassformer.training.loop import prepare_state, train_step
from glassformer.training.optimizers import DeadGradient
from tests.training import tiny
from tests.training.test_loop import batches


def test_a_non_finite_step_changes_nothing_and_says_where(tmp_path):
    session = tiny.session(tmp_path)
    state = prepare_state(session.run)
    first, second = batches(session, 2)
    train_step(state, first)
    with torch.no_grad():
        state.model.blocks[1].feedforward.up.weight[0, 0] = math.inf
    before = {n: p.detach().clone() for n, p in state.model.named_parameters()}
    held = {n: t.clone() for n, t in state.optimizer.state().items()}
    with pytest.raises(NonFinite, match=r"step 1: .*first at blocks\.1\.feedforward\.pre.*Nothing was updated"):
        train_step(state, second)
    assert all(torch.equal(p, before[n]) for n, p in state.model.named_parameters())
    assert all(torch.equal(t, held[n]) for n, t in state.optimizer.state().items())
    assert state.step == 1


def test_a_gradient_alone_that_is_not_finite_is_named(tmp_path):
    session = tiny.session(tmp_path)
    state = prepare_state(session.run)
    state.model.blocks[0].attention.o.weight.register_hook(lambda g: g * math.nan)
    with pytest.raises(NonFinite, match=r"gradient of decoder\.blocks\.0\.attention\.o\.weight is not"):
        train_step(state, batches(session, 1)[0])


def test_a_gradient_of_exactly_zero_is_refused(tmp_path):
    """What a compiler that loses the gradient looks like: the loss is right, and nothing is learnt."""
    session = tiny.session(tmp_path)
    state = prepare_state(session.run)
    real = state.loss_function
    state.loss_function = lambda *given: tuple(part.detach() + 0 * part for part in real(*given))
    before = {n: p.detach().clone() for n, p in state.model.named_parameters()}
    with pytest.raises(DeadGradient, match=r"step 1 has a loss of .* and a gradient of exactly zero"):
        train_step(state, batches(session, 1)[0])
    assert all(torch.equal(p, before[n]) for n, p in state.model.named_parameters())
