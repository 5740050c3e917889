"""Padded batches hold the same words whatever the amount."""

import pytest
import torch

from glassformer.doctor.probes.padding import conventions, feed_padded, pad_fill, padded
from tests.doctor.probes.subjects import gpt2


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_keep_their_words_on_either_side(side):
    subject = gpt2()
    batch = padded(subject, 9, [0, 3, 5], side, fill=0)
    for b, row in enumerate(batch.rows):
        assert torch.equal(batch.tokens[b][batch.mask[b]][None], row)
        assert bool((batch.tokens[b][~batch.mask[b]] == 0).all())
    assert batch.mask.sum(1).tolist() == [9, 6, 4]
    assert batch.positions[1][batch.mask[1]].tolist() == list(range(6))


def test_a_padded_prompt_continues_as_the_row_alone():
    subject = gpt2()
    with subject.isolated(6.0) as isolated:
        batch = padded(isolated, 9, [0, 4], "left", pad_fill(isolated))
        more = isolated.tokens(2, 3, seed=7)
        steps, _ = feed_padded(isolated, batch, more, "none", explicit=False)
        alone = isolated.logits(torch.cat([batch.rows[1], more[1:]], dim=1))[:, -3:]
    assert torch.allclose(steps[1:], alone, atol=1e-3)
    assert conventions(subject)[0] == "none"
