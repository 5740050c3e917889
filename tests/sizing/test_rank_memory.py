"""The memory of a rank: it holds what training holds, and less of what more ranks divide.

tests/bench/developer/test_ranks_memory.py compares the peak with fake and real ranks.
"""

import pytest

from glassformer.config import presets
from glassformer.model import build
from glassformer.sizing.parameters import count
from glassformer.sizing.rank_memory import held_parameters, rank_bytes, saved_by_sequence
from glassformer.sizing.strategy import Strategy, parse_strategy
from glassformer.training.distributed.exchange import Ranks
from glassformer.training.distributed.tensor import Division

GPT2 = presets.gpt2(vocab_size=50304)
LLAMA = presets.llama3_8b()


@pytest.mark.parametrize("size", [2, 4])
def test_devices_that_divide_layers_hold_what_training_holds(size):
    """The count of one device against the parameters that `Division` leaves it."""
    part = build(GPT2, device="meta")
    Division(Ranks(None, 0, size), GPT2.vocab_size).divide(part)
    named = {name: p.numel() for name, p in part.named_parameters()}
    found = held_parameters(GPT2, size)
    assert found.total == sum(named.values())
    assert found.layer == sum(n for name, n in named.items() if ".blocks.3." in name)
    assert found.rest == sum(n for name, n in named.items() if ".blocks." not in name)
    assert rank_bytes(GPT2, 8, Strategy(tensor=size), 1, 16, recompute=False) > 12 * found.total / (8 // size)


def test_copies_of_a_model_take_the_memory_of_fewer_shards():
    eight, copies = (
        rank_bytes(LLAMA, n, how, 1, 256, False) for n, how in ((8, Strategy()), (64, Strategy(replicate=8)))
    )
    assert copies == eight
    assert rank_bytes(LLAMA, 64, Strategy(), 1, 256, False) <= eight - 12 * count(LLAMA) * (1 / 8 - 1 / 64)


@pytest.mark.parametrize("recompute", [False, True])
def test_divided_sequences_keep_their_part_and_all_keys_and_values(recompute):
    whole, part = (saved_by_sequence(LLAMA, 8192, recompute, parts=n) for n in (1, 4))
    keys = 2 * 8192 * 3 / 4 * 8 * 2 * 128
    assert part.block == pytest.approx(whole.block / 4 + keys, rel=0.01)
    assert part.kept == pytest.approx(whole.kept / 4 + (0 if recompute else 32 * keys), rel=0.01)
    assert part.ends == pytest.approx(whole.ends / 4, rel=0.01)


def test_a_vocabulary_that_is_divided_has_smaller_logits():
    sizes = [rank_bytes(LLAMA, 8, parse_strategy(how), 1, 1024, True, 2) for how in ("sharded", "tensor 8")]
    assert sizes[1] < sizes[0] - 4 * 128_256 * 4096 * 7 / 8  # the gradient of the head alone


@pytest.mark.parametrize("plain_loss", [False, True])
def test_logits_are_computed_in_chunks(plain_loss):
    """Four times the sequences add what autograd saves for them, and no logits."""
    one, four = (rank_bytes(LLAMA, 8, Strategy(), n, 8192, True, 2, plain_loss) for n in (1, 4))
    each = saved_by_sequence(LLAMA, 8192, recompute=True)
    saved = 3 * (each.kept + each.ends + each.block)
    assert four - one <= saved + 4 * 128_256 * 4096  # the gradient of the head, summed over chunks


def test_the_residual_stream_has_the_dtype_in_which_weights_are_gathered():
    """Inputs of recomputed blocks take half the bytes, and matmuls read the output of norms without copies of it."""
    wide, narrow = (saved_by_sequence(LLAMA, 8192, True, stream=width) for width in (4, 2))
    assert narrow.kept == wide.kept / 2
    assert narrow.block == wide.block - 3 * 2 * 8192 * 4096  # copies for k, v and gate
    peak = [rank_bytes(LLAMA, 64, Strategy(context=8), 4, 65536, True, width) for width in (4, 2)]
    assert peak[0] - peak[1] > 4 * 65536 / 8 * 4096 * 32 * 2


def test_gradients_flow_through_the_hidden_units_of_a_block():
    """A recomputed step of many tokens: twice the hidden units of a gated layer, on each of the devices that divide."""
    small, large = (presets.llama3_8b(d_ff=d_ff) for d_ff in (14336, 2 * 14336))
    for degree in (1, 4):
        how = Strategy(tensor=degree)
        peaks = [rank_bytes(config, 64, how, 4, 65536, True, 2) for config in (small, large)]
        blocks = [4 * saved_by_sequence(config, 65536, True, degree, stream=2).block for config in (small, large)]
        weights = [held_parameters(config, degree) for config in (small, large)]
        layer = 8 * (weights[1].layer - weights[0].layer) + 12 * (weights[1].total - weights[0].total) / (64 // degree)
        assert peaks[1] - peaks[0] == pytest.approx(blocks[1] - blocks[0] + layer + 2 * 2 * 4 * 65536 * 14336 / degree)
