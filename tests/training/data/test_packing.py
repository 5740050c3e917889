"""Packed conversations: what fits where, in which order, and that it changes nothing for the model."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import glassformer as gf
from glassformer import config as c
from glassformer.training.data.batches import IGNORED
from glassformer.training.data.packing import ChatBatches, Row, collate, pack
from glassformer.training.objective import hidden_states, separate_documents, summed_loss
from glassformer.training.run import Loss
from tests import variants

LENGTHS = [5, 3, 9, 2, 7, 4, 4, 12, 2, 3]


def rows(lengths, seed=0, vocabulary=variants.V):
    drawn = np.random.default_rng(seed)
    return [
        Row(f"row {i}", ((drawn.integers(vocabulary, size=n), np.arange(n) % 3 > 0),)) for i, n in enumerate(lengths)
    ]


def test_every_row_is_packed_once_by_best_fit():
    groups = pack(LENGTHS, 12)
    assert sorted(i for group in groups for i in group) == list(range(len(LENGTHS)))
    assert all(sum(LENGTHS[i] for i in group) <= 12 for group in groups)
    assert len(groups) == 5  # 51 positions in 5 groups of 12
    assert pack([6, 5, 4, 3], 9) == [[0, 3], [1, 2]]
    assert pack([], 9) == []


def loss(model, batch):
    """The summed loss in float64; training computes it in float32."""
    logits = model.logits(hidden_states(model, batch)).flatten(0, 1)
    found = F.cross_entropy(logits, batch.targets.flatten(), ignore_index=IGNORED, reduction="sum")
    torch.testing.assert_close(summed_loss(model, batch, Loss(), True)[0], found.float())
    return found


@pytest.mark.parametrize("position", ["learned", "rotary", "sinusoidal", "alibi", "t5", "windows"])
def test_packed_documents_give_the_logits_and_the_gradient_of_separate_ones(position):
    """In float64, for every position scheme; one sequence has padding at its end."""
    schemes = {"learned": c.Learned(), "rotary": c.Rotary(), "sinusoidal": c.Sinusoidal(), "alibi": c.Alibi()}
    config = variants.decoder(position=schemes.get(position, c.T5Bias()), max_len=12)
    if position == "windows":  # on every other layer, shorter than the documents
        config = c.replace(variants.decoder(position=c.Rotary(), max_len=12), window=3, window_layers=(1,))
    model = gf.build(c.replace(config, init_std=0.3), seed=1).double()
    data = rows([6, 4, 9, 3, 5])
    packed = collate(data, [[2], [0, 1, 3], [4]], 12)
    assert packed.documents is not None
    total = loss(model, packed)
    wanted = torch.autograd.grad(total, list(model.parameters()))
    logits = model.logits(hidden_states(model, packed))
    separate, count = torch.zeros((), dtype=torch.float64), 0
    for row, (at, end) in ((0, (0, 5)), (1, (5, 8)), (3, (8, 10))):
        alone = collate(data, [[row]], 12)
        assert alone.documents is None
        torch.testing.assert_close(model(alone.inputs)[0], logits[1, at:end], atol=1e-12, rtol=1e-12)
    for row in range(5):
        alone = collate(data, [[row]], 12)
        separate = separate + loss(model, alone)
        count += alone.n_targets()
    assert count == packed.n_targets()
    torch.testing.assert_close(total, separate, atol=1e-10, rtol=1e-10)
    for ours, theirs in zip(wanted, torch.autograd.grad(separate, list(model.parameters())), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)


def test_without_the_mask_or_without_restarted_positions_packing_is_wrong():
    """The test above can fail: leaving out either half of the separation changes the loss."""
    model = gf.build(c.replace(variants.decoder(position=c.Learned(), max_len=12), init_std=0.3), seed=1).double()
    packed = collate(rows([6, 4, 3]), [[0, 1, 2]], 12)
    right = model.logits(hidden_states(model, packed))[:, :10]
    mask, positions = separate_documents(packed.documents)
    assert mask.shape == (1, 12, 12)
    assert separate_documents(packed.documents, (12, None))[0].shape == (1, 12, 12)  # a window without effect
    assert separate_documents(packed.documents, (11, None))[0].shape == (1, 2, 12, 12)
    assert (model(packed.inputs, positions=positions)[:, :10] - right).abs().max() > 0.01
    assert (model(packed.inputs, mask=mask)[:, :10] - right).abs().max() > 0.01
    assert positions[0, :10].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1]


def test_targets_are_the_next_tokens_that_are_learned():
    data = rows([6, 4])
    batch = collate(data, [[0, 1]], 9)
    (first, learned), ((second, _),) = data[0].parts[0], data[1].parts
    assert batch.inputs[0].tolist() == [*first[:-1], *second[:-1], 0]
    assert batch.documents[0].tolist() == [0] * 5 + [1] * 3 + [-1]
    wanted = [token if is_learned else IGNORED for token, is_learned in zip(first[1:], learned[1:], strict=True)]
    assert batch.targets[0, :5].tolist() == wanted
    assert batch.targets[0, 8] == IGNORED


@pytest.mark.parametrize("packs", [True, False])
def test_an_epoch_has_every_row_once_and_depends_on_the_seed_and_its_number_alone(packs):
    data = rows(LENGTHS)
    made = ChatBatches(data, 12, 2, seed=3, packs=packs)
    for epoch in range(3):
        assert sorted(i for group in made.epoch(epoch) for i in group) == list(range(len(data)))
    assert made.epoch(0) != made.epoch(1)
    assert ChatBatches(data, 12, 2, seed=3, packs=packs).epoch(1) == made.epoch(1)
    assert ChatBatches(data, 12, 2, seed=4, packs=packs).epoch(1) != made.epoch(1)


def test_a_step_needs_no_earlier_step_and_ranks_share_it():
    data = rows(LENGTHS)
    for step in (7, 0, 3):
        whole = ChatBatches(data, 12, 4, seed=3).batch(step)
        parts = [ChatBatches(data, 12, 4, seed=3, rank=rank, world=2).batch(step) for rank in range(2)]
        assert torch.equal(whole.inputs, torch.cat([part.inputs for part in parts]))
        assert torch.equal(whole.targets, torch.cat([part.targets for part in parts]))
    with pytest.raises(ValueError, match="not a multiple of the 3 processes"):
        ChatBatches(data, 12, 4, world=3)
