"""A model is seen through one interface: tokens in, logits out, layers by path."""

import pytest
import torch

from glassformer.doctor.probes import Unsupported, subject_of
from glassformer.doctor.subject.subject import layer_of
from tests.doctor.probes.subjects import Copycat, gpt2


def test_a_missing_argument_is_unsupported_not_guessed():
    with pytest.raises(Unsupported, match="no argument for a mask"):
        subject_of(Copycat()).logits(torch.zeros(1, 3, dtype=torch.long), mask=torch.ones(1, 3))
    with pytest.raises(Unsupported, match="takes no cache"):
        subject_of(Copycat()).new_cache()


def test_other_tokens_differ_everywhere():
    subject = gpt2()
    tokens = subject.tokens(3, 40)
    assert not bool((subject.other(tokens) == tokens).any())


def test_layers_are_found_by_path():
    blocks = gpt2().blocks()
    assert layer_of("decoder.blocks.1.attention.q", blocks) == ("decoder.blocks", 1)
    assert layer_of("head", blocks) is None
    assert subject_of(Copycat()).blocks() == {}
