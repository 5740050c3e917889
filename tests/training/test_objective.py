"""Losses: the textbook's values, sums that add up, masks and pairs as documented."""

import pytest
import torch
import torch.nn.functional as F

from glassformer import config as c
from glassformer.model import build
from glassformer.model.moe import balance_loss
from glassformer.training.data.batches import IGNORED
from glassformer.training.objective import Batch, Narrow, make_batch, summed_loss
from glassformer.training.run import Loss, read_run
from tests import variants
from tests.variants import tokens


def batch(rows=3, length=9):
    ids = tokens(rows, length + 1)
    return Batch(ids[:, :-1], ids[:, 1:])


def test_next_token_loss_is_the_shifted_cross_entropy_once():
    model, b = build(variants.decoder()), batch()
    total, plain = summed_loss(model, b, Loss(), True)
    expected = sum(-model(b.inputs).log_softmax(-1)[i, t, b.targets[i, t]] for i in range(3) for t in range(9))
    assert total is plain
    assert torch.isclose(plain, expected)


def test_ignored_targets_do_not_count():
    model, b = build(variants.decoder()), batch()
    targets = b.targets.clone()
    targets[0] = IGNORED
    some = Batch(b.inputs, targets)
    assert some.n_targets() == 18
    rest = summed_loss(model, b.rows(1, 3), Loss(z_loss=0.1, label_smoothing=0.1), True)[0]
    assert torch.isclose(summed_loss(model, some, Loss(z_loss=0.1, label_smoothing=0.1), True)[0], rest)


def test_parts_add_up_to_the_whole():
    model, b, loss = build(variants.decoder()), batch(6), Loss(z_loss=0.01, label_smoothing=0.1)
    whole = summed_loss(model, b, loss, True)[0]
    parts = sum(summed_loss(model, b.rows(i, i + 2), loss, True)[0] for i in (0, 2, 4))
    assert torch.isclose(whole, parts)


def test_smoothing_and_z_loss_by_their_formulas():
    model, b = build(variants.decoder()), batch()
    logits = model(b.inputs).flatten(0, 1)
    log_p = logits.log_softmax(-1)
    right = -log_p.gather(1, b.targets.flatten()[:, None]).sum()
    smoothed = 0.9 * right - 0.1 * log_p.mean(-1).sum()
    assert torch.isclose(summed_loss(model, b, Loss(label_smoothing=0.1), True)[0], smoothed)
    z = right + 0.5 * logits.logsumexp(-1).square().sum()
    assert torch.isclose(summed_loss(model, b, Loss(z_loss=0.5), True)[0], z)
    # reported and evaluated is the plain one
    assert torch.isclose(summed_loss(model, b, Loss(z_loss=0.5, label_smoothing=0.1), True)[1], right)
    assert torch.isclose(summed_loss(model, b, Loss(z_loss=0.5, label_smoothing=0.1), False)[0], right)


def test_balance_loss_joins_in_training_only():
    feedforward = c.MoE(n_experts=5, n_active=2, expert=c.Dense(d_ff=7))
    model, b = build(variants.decoder(feedforward=feedforward)), batch()
    plain = summed_loss(model, b, Loss(balance=0.0), True)[0]
    with_balance = summed_loss(model, b, Loss(balance=1.0), True)[0]
    assert with_balance - plain > 0.9 * 27  # at least 1 per target when even
    assert torch.isclose(summed_loss(model, b, Loss(balance=1.0), False)[0], plain)
    assert balance_loss(torch.full((4, 2), 0.5), torch.tensor([[0], [1], [0], [1]])) == 1


def test_masked_batches_use_the_extra_id_and_count_their_targets():
    run = read_run("", ("model.preset=bert_base", "model.vocab_size=32", "model.max_len=40", "loop.steps=200"))
    ids = tokens(4, 41, vocab=31)
    b = make_batch(run, (ids[:, :-1], ids[:, 1:]), step=3)
    assert b.n_targets() == 4 * 6  # round(0.15 * 40)
    chosen = b.targets != IGNORED
    assert torch.equal(b.targets[chosen], ids[:, :-1][chosen])
    assert torch.equal(b.inputs[~chosen], ids[:, :-1][~chosen])
    assert (b.inputs[chosen] == 31).float().mean() > 0.5
    again = make_batch(run, (ids[:, :-1], ids[:, 1:]), step=3)
    assert torch.equal(again.inputs, b.inputs)
    assert not torch.equal(make_batch(run, (ids[:, :-1], ids[:, 1:]), step=4).inputs, b.inputs)


def test_seq2seq_batches_split_the_window():
    run = read_run("", ("model.preset=transformer_base", "model.vocab_size=32", "loop.context=8", "loop.steps=200"))
    ids = tokens(2, 9, vocab=31)
    b = make_batch(run, (ids[:, :-1], ids[:, 1:]), step=0)
    assert torch.equal(b.source, ids[:, :4])
    assert torch.equal(b.targets, ids[:, 4:8])
    assert torch.equal(b.inputs[:, 1:], ids[:, 4:7])
    assert b.n_tokens() == 16


@pytest.mark.parametrize("make", [variants.decoder, variants.seq2seq])
def test_loss_has_a_gradient_everywhere_it_should(make):
    model = build(make())
    ids = tokens(2, 9)
    b = Batch(ids[:, :-1], ids[:, 1:], ids if make is variants.seq2seq else None)
    summed_loss(model, b, Loss(), True)[0].backward()
    assert all(p.grad is not None for p in model.parameters())
    assert F.cross_entropy(torch.zeros(1, 4), torch.tensor([2])).item() == pytest.approx(1.3863, abs=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_chunked_head_gives_the_same_loss_and_gradients(monkeypatch, tied):
    config = variants.decoder(head=c.Head(tied=tied, bias=True, scale=0.5))
    b, loss = batch(), Loss(label_smoothing=0.1, z_loss=0.01)
    results = []
    for limit in (10**9, 1):
        monkeypatch.setattr("glassformer.training.objective.CHUNKED_FROM", limit)
        model = build(config)
        total, plain = summed_loss(model, b, loss, True)
        total.backward()
        results.append((total, plain, {n: p.grad for n, p in model.named_parameters()}))
    assert torch.isclose(results[0][0], results[1][0])
    assert torch.isclose(results[0][1], results[1][1])
    for name, gradient in results[0][2].items():
        assert torch.allclose(gradient, results[1][2][name], atol=1e-5), name


def test_a_narrow_stream_carries_bf16_between_blocks_and_moves_the_loss_by_its_rounding_only():
    model, b = build(variants.decoder()), batch(8, 20)

    class Kinds:
        def __init__(self):
            self.seen = {}

        def __call__(self, site, value):
            self.seen[site] = value.dtype
            return value

        def wants(self, site):
            return False

    heard = Kinds()
    with torch.autocast("cpu", torch.bfloat16):
        wide = float(summed_loss(model, b, Loss(), True)[1].detach())
        narrow = float(summed_loss(model, b, Loss(), True, torch.bfloat16)[1].detach())
        model.encode(b.inputs, tap=Narrow(heard, torch.bfloat16))
    assert heard.seen["embed"] == torch.float32  # as the model made it, before it is narrowed
    assert {heard.seen[site] for site in heard.seen if "resid" in site} == {torch.bfloat16}
    assert 0 < abs(wide - narrow) / wide < 2**-8


@pytest.mark.parametrize("vocab_size", [31, 4099])
def test_capped_logits_have_their_loss_with_a_small_and_a_large_vocabulary(vocab_size):
    """The loss in chunks multiplies hidden states by the head's matrix: a cap on the logits has no place there."""
    sizes = {"n_layers": 1, "d_model": 8, "n_heads": 2, "d_ff": 8, "vocab_size": vocab_size}
    model = build(c.presets.llama_tiny(**sizes, head__softcap=0.5), seed=0)
    with torch.no_grad():
        model.embed.tokens.weight.mul_(50)  # logits beyond the cap
    ids = torch.randint(0, vocab_size, (2, 6), generator=torch.Generator().manual_seed(0))
    total, plain = summed_loss(model, Batch(ids[:, :-1], ids[:, 1:]), Loss(), training=True)
    expected = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(plain, expected)
