"""Required arguments are filled by what their names say."""

import torch

from glassformer.doctor.subject.arguments import MASKS, fillers

TOKENS = torch.zeros(2, 3, dtype=torch.long)


def test_names_say_what_is_wanted():
    assert fillers("start_pos")[0](TOKENS, 4) == 4
    assert fillers("input_pos")[0](TOKENS, 4).tolist() == [4, 5, 6]
    assert fillers("segment_ids")[0](TOKENS, 0).shape == (2, 3)
    assert fillers("seq_len")[0](TOKENS, 0) == 3
    assert fillers("lengths")[0](TOKENS, 1).tolist() == [4, 4]
    assert fillers("training")[0](TOKENS, 0) is False
    assert fillers("image") == []


def test_masks_are_tried_from_none_to_causal_ones():
    assert fillers("attn_mask") == list(MASKS)
    made = [make(TOKENS, 1) for make in MASKS]
    assert made[0] is None
    assert made[3].tolist() == [[True, True, False, False], [True, True, True, False], [True, True, True, True]]
    assert torch.equal(made[6], ~made[3])
    assert made[7][0, 3] == -torch.inf


def test_a_block_mask_is_causal():
    block = fillers("block_mask")[0](torch.zeros(1, 128, dtype=torch.long), 0)
    assert block.shape[-2:] == (128, 128)
