"""The decode state: padding on the correct side, one position of work per cached token."""

import contextlib

import torch

from glassformer.generation.state import TorchState, evaluating, one_thread, pad
from tests.variants import decoder, lively, seq2seq

CPU = torch.device("cpu")


def test_padding_by_hand():
    tokens, real = pad([[5], [6, 7, 8]], "left", CPU)
    assert tokens[:, -1].tolist() == [5, 8]
    assert real.tolist() == [[False, False, True], [True, True, True]]
    tokens, real = pad([[5], [6, 7, 8]], "right", CPU)
    assert tokens[:, 0].tolist() == [5, 6]
    assert real.tolist() == [[True, False, False], [True, True, True]]
    assert pad([[1, 2], [3, 4]], "left", CPU)[1] is None


def test_numbers_of_either_sign_are_padded():
    """Segments are padded too, and the model names the one that it does not have."""
    tokens, _ = pad([[3, -1], [2**31, 0]], "right", CPU)
    assert tokens.dtype is torch.int64
    assert tokens.tolist() == [[3, -1], [2**31, 0]]


def test_modes_are_put_back_module_by_module():
    model, _ = lively(decoder(dropout=0.5))
    model.train()
    model.decoder.blocks[1].eval()
    before = [module.training for module in model.modules()]
    with contextlib.suppress(ZeroDivisionError), evaluating(model):
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
        raise ZeroDivisionError
    assert [module.training for module in model.modules()] == before
    assert torch.is_grad_enabled()


def test_threads_are_put_back():
    """Two, whatever the machine has: the suite itself runs with one."""
    torch.set_num_threads(2)
    try:
        for wanted, inside in ((True, 1), (False, 2)):
            with contextlib.suppress(ZeroDivisionError), one_thread(wanted):
                assert torch.get_num_threads() == inside
                raise ZeroDivisionError
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


class Counting(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.columns = inner, []

    def forward(self, x, *rest):
        self.columns.append(x.shape[1])
        return self.inner(x, *rest)


@torch.no_grad()
def test_a_cached_step_works_on_one_column_and_an_uncached_one_on_all():
    """T tokens from a prompt of one: T columns of work with a cache, T(T+1)/2 without. T = 10: 10 and 55."""
    for cache, expected in [("static", 10), (None, 55)]:
        model, _ = lively(decoder())
        model.decoder.blocks[0] = counter = Counting(model.decoder.blocks[0])
        state = TorchState(model, [[1]], 10, cache, None)
        state.start()
        for token in range(9):
            state.step(torch.tensor([token]))
        assert sum(counter.columns) == expected


@torch.no_grad()
def test_the_source_is_encoded_once():
    model, _ = lively(seq2seq())
    model.encoder.blocks[0] = counter = Counting(model.encoder.blocks[0])
    state = TorchState(model, [[1, 2, 3], [4]], 5, "static", None)
    state.start()
    for _ in range(4):
        state.step(torch.tensor([1, 2]))
    assert counter.columns == [3]
