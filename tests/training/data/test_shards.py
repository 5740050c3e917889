"""Several token files are read as one array is."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from glassformer.training.data.batches import Batches, eval_batches
from glassformer.training.data.shards import Shards
from tests.sampled import examples


def divided(folder, tokens, cuts):
    """Write tokens to files that end at the cuts."""
    pieces = np.split(tokens, sorted(cuts))
    files = []
    for number, piece in enumerate(piece for piece in pieces if len(piece)):
        files.append(folder / f"train-{number:05d}.bin")
        piece.tofile(files[-1])
    return Shards(files, [len(piece) for piece in pieces if len(piece)], str(tokens.dtype))


@hypothesis.given(st.sets(st.integers(1, 99)), st.integers(0, 110), st.integers(0, 110), st.integers(1, 30))
@hypothesis.settings(max_examples=examples(40))
def test_slices_and_windows_are_those_of_one_array(tmp_path_factory, cuts, begin, end, width):
    tokens = np.random.default_rng(0).integers(0, 60_000, 100).astype(np.uint16)
    shards = divided(tmp_path_factory.mktemp("x"), tokens, cuts)
    assert len(shards) == 100
    assert shards[begin:end].tolist() == tokens[begin:end].tolist()
    assert shards[-begin:].tolist() == tokens[-begin:].tolist()
    offsets = np.arange(0, 100 - width, 3)
    assert shards.windows(offsets, width).tolist() == [tokens[at : at + width].tolist() for at in offsets]
    assert shards.max() == tokens.max()
    assert np.asarray(shards).tolist() == tokens.tolist()


@pytest.mark.parametrize("mode", ["random", "epoch"])
def test_batches_of_five_files_are_those_of_one(tmp_path, mode):
    tokens = np.random.default_rng(1).integers(0, 70_000, 1009).astype(np.uint32)
    shards = divided(tmp_path, tokens, (3, 10, 500, 1000))
    for step in range(30):
        for one, other in zip(
            Batches(tokens, 7, 6, mode=mode).batch(step), Batches(shards, 7, 6, mode=mode).batch(step), strict=True
        ):
            assert torch.equal(one, other)
    for one, other in zip(eval_batches(tokens, 7, 5), eval_batches(shards, 7, 5), strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


def test_a_slice_has_step_one(tmp_path):
    with pytest.raises(IndexError, match="step 1, not 2"):
        divided(tmp_path, np.arange(9, dtype=np.uint16), (4,))[::2]
