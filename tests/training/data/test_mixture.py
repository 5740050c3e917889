"""Corpora with weights: exact shares, every window once, the same for any number of ranks."""

from collections import Counter

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from glassformer.errors import ConfigError
from glassformer.training import open_session, read_run, resume_session, train
from glassformer.training.data.batches import Batches
from glassformer.training.data.corpus import DataError
from glassformer.training.data.mixture import BLOCK, MixedBatches, Mixture, apportion
from glassformer.training.data.source import prepare
from tests.sampled import examples
from tests.training import tiny

T = 5


def mixed(sizes, weights, batch, rank=0, world=1, seed=0, mode="epoch"):
    """Corpora whose tokens are their own positions, each with an offset of a million."""
    parts = [
        Batches(1_000_000 * i + np.arange(size, dtype=np.uint32), T, batch, seed, rank, world, mode=mode)
        for i, size in enumerate(sizes)
    ]
    return MixedBatches(tuple(parts), tuple(apportion(weights, BLOCK)))


@hypothesis.given(st.lists(st.floats(0.001, 100), min_size=1, max_size=6), st.integers(1, 5000))
@hypothesis.settings(max_examples=examples(40))
def test_shares_are_whole_numbers_within_one_of_the_exact_ones(weights, total):
    counts = apportion(tuple(weights), total)
    assert sum(counts) == total
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - total * weight / sum(weights)) < 1 + 1e-6


def test_every_block_has_the_exact_shares_in_a_random_order():
    order = mixed((400, 300, 200), (2, 1, 1), 64)
    corpora = np.concatenate([order.draws(step)[0] for step in range(2 * BLOCK // 64)]).reshape(2, BLOCK)
    for block in corpora:
        assert Counter(block.tolist()) == {0: BLOCK // 2, 1: BLOCK // 4, 2: BLOCK // 4}
        assert abs(np.corrcoef(block[1:], block[:-1])[0, 1]) < 4 / np.sqrt(BLOCK)
    assert (corpora[0] == corpora[1]).mean() < 0.45  # 3/8 of the places agree by chance


@pytest.mark.parametrize("mode", ["random", "epoch"])
@hypothesis.given(world=st.sampled_from([1, 2, 3, 4]), step=st.integers(0, 10**9), seed=st.integers(0, 2**64))
@hypothesis.settings(max_examples=12)
def test_the_rows_of_all_ranks_are_those_of_one_process(mode, world, step, seed):
    given = ((501, 302, 57), (1, 0.5, 0.2), 12)
    single = mixed(*given, seed=seed, mode=mode).batch(step)
    ranks = [mixed(*given, rank=rank, world=world, seed=seed, mode=mode).batch(step) for rank in range(world)]
    for i in range(2):
        assert torch.equal(torch.cat([batch[i] for batch in ranks]), single[i])
    assert torch.equal(single[1], single[0] + 1)


def test_every_window_of_every_corpus_is_read_once_before_any_is_read_again():
    sizes, batch = (3 * BLOCK * T + 1, BLOCK * T + 1), 512  # 3 and 1 blocks of windows
    order = mixed(sizes, (3, 1), batch)
    seen = [[], []]
    for step in range(4 * BLOCK // batch):
        corpora, offsets = order.offsets(step)
        for corpus, offset in zip(corpora.tolist(), offsets.tolist(), strict=True):
            seen[corpus].append(offset)
    for offsets, size in zip(seen, sizes, strict=True):
        assert sorted(offsets) == list(range(0, size - 1, T))


def test_a_weight_that_is_too_small_is_a_sentence(tmp_path):
    part = prepare(tiny.corpus(tmp_path), "char", tmp_path / "out")
    with pytest.raises(
        DataError, match=r"corpus has the weight 0\.0001 in data\.mix, less than 1 / 4096 of all: raise it\."
    ):
        Mixture((part, part), (1.0, 0.0001)).check(16)


def run_file(folder, weight=0.5):
    tiny.corpus(folder)
    (folder / "more.jsonl").write_text('{"body": "the cat sat on the mat. the dog ate that hat."}\n' * 300)
    for number in range(100):
        with (folder / "more.jsonl").open("a") as file:
            file.write(f'{{"body": "{"a" * (number % 17)} man and a red van {"the " * (number % 13)}"}}\n')
    return (
        f'out = "{folder / "run"}"\n[data]\norder = "epoch"\n'
        f'corpus = "{folder / "corpus.txt"}"\ncache = "{folder / "tokens"}"\n'
        f'[[data.mix]]\ncorpus = "{folder / "more.jsonl"}"\nfield = "body"\nweight = {weight}\n'
    )


def test_a_run_mixes_corpora_and_resumes_bit_for_bit(tmp_path):
    text = run_file(tmp_path)
    settings = (*tiny.SMALL, "loop.steps=6", "schedule.kind=constant", "machine.compile=no")
    session = open_session(read_run(text, settings))
    first, second = session.data.parts
    assert first.tokenizer.to_json() == second.tokenizer.to_json()
    assert session.run.data.sha256 == f"{first.digest}+{second.digest}"
    facts = session.data.facts(session.run)
    assert [round(part["share"], 3) for part in facts["mix"]] == [0.667, 0.333]
    whole = train(session.run, session.data)
    again = open_session(read_run(text.replace("/run", "/again"), (*settings, "loop.steps=4")))
    train(again.run, again.data)
    longer = resume_session(str(tmp_path / "again"), ("loop.steps=6",))
    resumed = train(longer.run, longer.data, resume=longer.resume)
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(parameter, resumed.model.get_parameter(name))


def test_a_mixture_is_of_texts(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.mix\.weight=-1\.0 must be positive"):
        read_run(run_file(tmp_path, weight=-1))
    with pytest.raises(ConfigError, match=r"\[\[data\.mix\]\] mixes texts"):
        read_run('[data]\ncorpus = "task:repeat"\n[[data.mix]]\ncorpus = "x"\n')
