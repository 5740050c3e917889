"""The order of the data: a function of the step, the same for any number of ranks, with no repeats and no gaps."""

from collections import Counter

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from glassformer.training.data.batches import (
    IGNORED,
    Batches,
    eval_batches,
    mask_tokens,
    permuted,
    prefix_pairs,
)
from glassformer.training.data.corpus import DataError

T = 7


def counting(n):
    """Tokens that are their own positions."""
    return np.arange(n, dtype=np.uint32)


def refusal(act):
    with pytest.raises(DataError) as refused:
        act()
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("mode", ["random", "epoch"])
def test_targets_are_the_tokens_one_later(mode):
    inputs, targets = Batches(counting(1009), T, 6, mode=mode).batch(3)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (6, T)
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(T))


@pytest.mark.parametrize("rows", [1, 3])
def test_inputs_and_targets_share_no_memory(rows):
    """Regression: one row of a window is contiguous as it is, and changing a target changed an input."""
    inputs, targets = Batches(counting(1009), T, rows).batch(0)
    before = inputs.clone()
    targets[:] = IGNORED
    assert torch.equal(inputs, before)


@pytest.mark.parametrize("mode", ["random", "epoch"])
def test_a_batch_is_a_function_of_seed_and_step(mode):
    first, again = (Batches(counting(1009), T, 6, seed=5, mode=mode) for _ in range(2))
    forward = [first.batch(step)[0] for step in range(40)]
    for step in (39, 3, 17, 0):
        assert torch.equal(again.batch(step)[0], forward[step])
    other = Batches(counting(1009), T, 6, seed=6, mode=mode)
    assert not torch.equal(other.batch(0)[0], forward[0])
    assert len({tuple(batch[:, 0].tolist()) for batch in forward}) == 40


@pytest.mark.parametrize("mode", ["random", "epoch"])
def test_iteration_begins_where_it_is_asked_to(mode):
    whole = iter(Batches(counting(1009), T, 6, mode=mode))
    resumed = iter(Batches(counting(1009), T, 6, start=10, mode=mode))
    batches = [next(whole) for _ in range(20)]
    for inputs, targets in batches[10:]:
        again = next(resumed)
        assert torch.equal(again[0], inputs)
        assert torch.equal(again[1], targets)


@pytest.mark.parametrize("mode", ["random", "epoch"])
@hypothesis.given(world=st.sampled_from([1, 2, 3, 4, 6, 12]), step=st.integers(0, 10**9), seed=st.integers(-5, 2**64))
def test_the_rows_of_all_ranks_are_those_of_one_process(mode, world, step, seed):
    tokens = counting(5003)
    single = Batches(tokens, T, 12, seed, mode=mode).batch(step)
    ranks = [Batches(tokens, T, 12, seed, rank, world, mode=mode).batch(step) for rank in range(world)]
    for i in range(2):
        assert torch.equal(torch.cat([batch[i] for batch in ranks]), single[i])


@hypothesis.given(st.integers(T + 1, 300), st.integers(1, 40), st.integers(0, 99))
def test_an_epoch_has_every_window_once_and_every_target_once(n, batch_size, seed):
    batches = Batches(counting(n), T, batch_size, seed, mode="epoch")
    n_windows = (n - 1) // T
    rows = []
    for step in range(-(-3 * n_windows // batch_size)):
        rows += batches.offsets(step).tolist()
    for epoch in range(3):
        seen = rows[epoch * n_windows : (epoch + 1) * n_windows]
        assert sorted(seen) == [T * i for i in range(n_windows)]
    targets = [offset + 1 + i for offset in rows[:n_windows] for i in range(T)]
    assert sorted(targets) == list(range(1, n_windows * T + 1))


def test_epochs_differ_and_are_really_shuffled():
    batches = Batches(counting(T * 1000 + 1), T, 1000, mode="epoch")
    assert batches.n_windows == 1000
    epochs = [batches.offsets(step) for step in range(4)]
    for i in range(4):
        assert abs(np.corrcoef(epochs[i], np.arange(1000))[0, 1]) < 0.13  # 4 standard deviations of 1/sqrt(1000)
        for j in range(i):
            assert (epochs[i] == epochs[j]).sum() < 10  # 1 expected


def test_small_epochs_take_all_orders_equally():
    orders = Counter()
    for seed in range(2400):
        orders[tuple(Batches(counting(3 * T + 1), T, 3, seed, mode="epoch").offsets(0).tolist())] += 1
    assert len(orders) == 6
    assert max(abs(n - 400) for n in orders.values()) < 80  # 4 standard deviations of 18


def test_random_offsets_are_uniform_and_reach_both_ends():
    batches = Batches(counting(T + 10), T, 100)
    counts = np.bincount(np.concatenate([batches.offsets(step) for step in range(200)]), minlength=10)
    assert len(counts) == 10
    assert np.abs(counts - 2000).max() < 180  # 4 standard deviations of 42


def test_rows_of_a_larger_batch_begin_with_those_of_a_smaller():
    small, large = (Batches(counting(1009), T, size) for size in (6, 13))
    assert torch.equal(large.batch(4)[0][:6], small.batch(4)[0])


def test_a_memory_map_is_read_as_an_array_is(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 65, 999).astype(np.uint16)
    tokens.tofile(tmp_path / "train.bin")
    mapped = np.memmap(tmp_path / "train.bin", np.uint16, "r")
    assert torch.equal(Batches(mapped, T, 6).batch(1)[0], Batches(tokens, T, 6).batch(1)[0])


@hypothesis.given(st.integers(1, 3000), st.integers(-3, 2**64), st.integers(0, 2**40))
def test_a_permutation_has_every_number_once_and_any_index_at_once(n, seed, epoch):
    whole = permuted(seed, epoch, n, np.arange(n))
    assert sorted(whole.tolist()) == list(range(n))
    some = np.array([n - 1, 0, n // 2])
    assert permuted(seed, epoch, n, some).tolist() == whole[some].tolist()


@pytest.mark.parametrize("n", [2**20, 2**20 + 1, 10**6 + 3])
def test_a_large_permutation_looks_random(n):
    first, second = (permuted(seed, 0, n, np.arange(n)) for seed in (0, 1))
    assert np.array_equal(np.sort(first), np.arange(n))
    for order in (first, second):
        assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 4 / np.sqrt(n)
        assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 4 / np.sqrt(n)
        halves = np.bincount(order[: n // 2] * 16 // n, minlength=16)  # what the first half of an epoch reads
        assert np.abs(halves - n / 32).max() < 4 * np.sqrt(n / 64)
    assert (first == second).sum() < 10  # 1 expected


def test_the_first_of_four_windows_is_each_of_them_equally_often():
    firsts = Counter(int(permuted(seed, seed // 7, 4, np.array([0]))[0]) for seed in range(4000))
    assert max(abs(firsts[i] - 1000) for i in range(4)) < 110  # 4 standard deviations of 27


def test_an_epoch_of_a_trillion_tokens_takes_no_memory():
    class Long:
        def __len__(self):
            return 10**12

    batches = Batches(Long(), 2048, 512, mode="epoch")
    assert batches.n_windows == (10**12 - 1) // 2048
    offsets = [batches.offsets(step) for step in (0, 10**5, 10**6)]  # the last one lies in the second epoch
    assert all(((found >= 0) & (found < 10**12 - 2048)).all() for found in offsets)
    assert len(np.unique(np.concatenate(offsets))) > 1530


def test_the_order_is_the_recorded_one():
    """Other numbers here would mean that no older run can be resumed."""
    assert Batches(counting(1009), T, 4, seed=1).offsets(2).tolist() == [493, 862, 255, 200]
    assert Batches(counting(1009), T, 4, seed=1, mode="epoch").offsets(2).tolist() == [35, 574, 987, 273]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"context": 0}, "context=0 must be at least 1"),
        ({"context": 100}, "100 tokens are too few for a context of 100"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"mode": "sorted"}, "random, epoch"),
        ({"world": 4}, "batch_size=6 is not a multiple of world=4"),
        ({"world": 2, "rank": 2}, "rank=2"),
    ],
)
def test_wrong_settings_are_sentences(settings, words):
    assert words in refusal(lambda: Batches(**({"tokens": counting(100), "context": T, "batch_size": 6} | settings)))


# evaluation


@hypothesis.given(st.integers(T + 1, 200), st.integers(1, 9))
def test_evaluation_asks_for_every_token_but_the_first_once(n, batch_size):
    targets = []
    for inputs, wanted in eval_batches(counting(n), T, batch_size):
        assert inputs.shape == wanted.shape
        assert inputs.shape[1] == T
        kept = wanted != IGNORED
        assert torch.equal(wanted[kept], (inputs + 1)[kept])
        targets += wanted[kept].tolist()
    assert targets == list(range(1, n))


@hypothesis.given(st.integers(T + 1, 400), st.integers(1, 9), st.integers(1, 12))
def test_a_limited_evaluation_is_spread_over_the_text_and_fixed(n, batch_size, limit):
    batches = list(eval_batches(counting(n), T, batch_size, limit))
    assert len(batches) <= limit
    starts = torch.cat([inputs[:, 0] for inputs, _ in batches])
    assert len(set(starts.tolist())) == len(starts)
    n_windows = (n - 1) // T
    if limit * batch_size <= n_windows:
        assert len(starts) == limit * batch_size
        assert int(starts.max()) >= T * (n_windows - n_windows // (limit * batch_size) - 1)
    again = list(eval_batches(counting(n), T, batch_size, limit))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(batches, again, strict=True))


def test_evaluation_of_too_short_a_text_is_refused():
    assert "too few" in refusal(lambda: list(eval_batches(counting(T), T, 2)))


# objectives


def test_masking_follows_the_80_10_10_rule():
    V, mask_id, B, L = 50, 50, 64, 200
    tokens = torch.randint(0, V, (B, L))
    counts = np.zeros(3)
    for step in range(40):
        inputs, targets = mask_tokens(tokens, mask_id, V, seed=1, step=step)
        chosen = targets != IGNORED
        assert (chosen.sum(1) == 30).all()  # 15 % of 200, in every row
        assert torch.equal(targets[chosen], tokens[chosen])
        assert torch.equal(inputs[~chosen], tokens[~chosen])
        masked, same = inputs[chosen] == mask_id, inputs[chosen] == tokens[chosen]
        counts += [masked.sum(), (~masked & ~same).sum(), same.sum()]
    n = 40 * B * 30
    # a random token is the old one once in V; 4 standard deviations
    expected = n * np.array([0.8, 0.1 * (1 - 1 / V), 0.1 * (1 + 1 / V)])
    assert (np.abs(counts - expected) < 4 * np.sqrt(expected)).all()


def test_every_position_is_masked_equally_often():
    tokens = torch.zeros(50, 20, dtype=torch.int64)
    chosen = sum((mask_tokens(tokens, 9, 5, 0, step)[1] != IGNORED).sum(0) for step in range(100))
    assert int(chosen.sum()) == 100 * 50 * 3
    assert (chosen - 750).abs().max() < 4 * 26  # sqrt(5000 * 0.15 * 0.85) = 25.2


def test_replacements_are_uniform_over_the_vocabulary():
    tokens = torch.full((100, 100), 7)
    inputs, targets = mask_tokens(tokens, 99, 10, 0, 0, rate=1.0)
    assert (targets == 7).all()
    random = inputs[(inputs != 99) & (inputs != 7)]
    counts = torch.bincount(random, minlength=10)
    assert counts[7] == 0
    assert (counts[counts > 0] - 100).abs().max() < 45


def test_masking_is_a_function_of_seed_and_step_and_the_rows_of_ranks_fit_together():
    tokens = torch.randint(0, 50, (6, 13))
    whole = mask_tokens(tokens, 50, 50, 3, 8)
    for i in range(2):
        assert torch.equal(mask_tokens(tokens, 50, 50, 3, 8)[i], whole[i])
        parts = [mask_tokens(tokens[r : r + 2], 50, 50, 3, 8, first_row=r)[i] for r in (0, 2, 4)]
        assert torch.equal(torch.cat(parts), whole[i])
    assert not torch.equal(mask_tokens(tokens, 50, 50, 3, 9)[1], whole[1])
    assert not torch.equal(mask_tokens(tokens, 50, 50, 4, 8)[1], whole[1])


def test_even_a_short_row_has_a_target():
    _, targets = mask_tokens(torch.zeros(5, 2, dtype=torch.int64), 9, 9, 0, 0)
    assert ((targets != IGNORED).sum(1) == 1).all()


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.5])
def test_a_wrong_rate_is_a_sentence(rate):
    assert f"rate={rate}" in refusal(lambda: mask_tokens(torch.zeros(2, 9, dtype=torch.int64), 9, 9, 0, 0, rate))


@pytest.mark.parametrize("length", [2, 7, 12])
def test_halves_become_source_and_target(length):
    tokens = torch.randint(0, 50, (3, length))
    source, inputs, targets = prefix_pairs(tokens, start=50)
    assert source.shape == (3, length // 2)
    assert torch.equal(torch.cat([source, targets], 1), tokens)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert (inputs[:, 0] == 50).all()


def test_one_token_has_no_halves():
    assert "use 2 or more" in refusal(lambda: prefix_pairs(torch.zeros(2, 1, dtype=torch.int64), 0))
