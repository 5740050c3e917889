"""Embeddings that share their weight with the head: gradients are those of autograd, added to the head's in place."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from glassformer import config as c
from glassformer.kernels.cuda.training import embedding
from glassformer.kernels.replacement import replace_modules
from glassformer.training import objective
from glassformer.training.chunked_loss import linear_cross_entropy
from glassformer.training.objective import Batch, summed_loss
from glassformer.training.run import Loss
from tests.variants import decoder, lively


@given(st.lists(st.integers(0, 6), min_size=1, max_size=20))
def test_rows_of_equal_tokens_are_added(tokens):
    ids = torch.tensor(tokens)
    draw = torch.Generator().manual_seed(len(tokens))
    total, rows = torch.randn(7, 3, generator=draw), torch.randn(len(tokens), 3, generator=draw)
    wanted = total.double().index_add(0, ids, rows.double())
    embedding.add_rows(total, ids, rows)
    assert torch.allclose(total.double(), wanted, atol=1e-5)


def gradients(model, batch, stream):
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        total, _ = summed_loss(model.train(), batch, Loss(), True, stream=stream)
    (total / batch.n_targets()).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("chunked_from", [1, 10**6])
@pytest.mark.parametrize("stream", [None, torch.bfloat16])
def test_gradients_of_a_model(chunked_from, stream, monkeypatch):
    """With the head's loss in chunks its gradient is left to the embedding, otherwise autograd adds both."""
    monkeypatch.setattr(objective, "CHUNKED_FROM", chunked_from)
    model = lively(decoder(head=c.Head()))[0].float()
    ids = torch.randint(0, model.config.vocab_size, (3, 12), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    wanted = gradients(model, batch, stream)
    assert replace_modules(embedding.replacements(model))
    used = []
    monkeypatch.setattr(embedding, "add_rows", lambda *given, right=embedding.add_rows: used.append(right(*given)))
    for _ in range(2):
        found = gradients(model, batch, stream)
        for name, gradient in wanted.items():
            assert torch.allclose(found[name], gradient, rtol=1e-5, atol=1e-6), name
    assert len(used) == 2 * (chunked_from == 1)


def test_a_head_without_such_an_embedding_keeps_its_gradient(monkeypatch):
    weight, draw = torch.nn.Parameter(torch.randn(9, 4)), torch.Generator().manual_seed(0)
    hidden, targets = torch.randn(5, 4, generator=draw), torch.tensor([1, 2, 3, 4, 0])
    total, _ = linear_cross_entropy(hidden, weight, targets)
    total.backward()
    exact = torch.autograd.grad(F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum"), weight)[0]
    assert torch.allclose(weight.grad, exact, atol=1e-5)
    assert embedding.leave(weight, exact) is exact
    setattr(weight, embedding.SLOT, [])
    assert embedding.leave(weight, exact) is None
    assert embedding.leave(weight, exact) is exact  # of a second head


def test_what_is_replaced():
    tied, untied = (lively(decoder(head=c.Head(tied=tied)))[0] for tied in (True, False))
    assert not replace_modules(embedding.replacements(untied))
    assert replace_modules(embedding.replacements(tied))
    before = tied.embed.tokens.weight.grad
    tied.eval()
    with torch.no_grad():
        tied(torch.zeros(1, 2, dtype=torch.long))
    assert before is None
    assert not hasattr(tied.embed.tokens.weight, embedding.SLOT)  # only training steps
