"""Special ids and declared documents."""

from types import SimpleNamespace

import torch

from glassformer.doctor.training.listen import Forward
from glassformer.doctor.training.pipeline import find_pipeline
from glassformer.doctor.training.tokens import _documents, special_ids
from tests.doctor.training.pipelines import EOS, PAD, Plain


def test_ids_come_from_the_tokenizer_and_then_from_the_config():
    assert special_ids(find_pipeline(Plain())) == {"pad": PAD, "eos": EOS, "bos": None}
    words = SimpleNamespace(pad_token_id=7, eos_token_id=None)
    assert special_ids(find_pipeline(Plain(), tokenizer=words)) == {"pad": 7, "eos": EOS, "bos": None}


def test_documents_are_declared_by_their_numbers_or_by_positions_that_begin_again():
    tokens = torch.zeros(1, 4, dtype=torch.long)

    def documents(**given):
        return _documents(Forward(tokens, True, given=((), given)))

    assert documents() is None
    assert documents(position_ids=torch.tensor([[0, 1, 2, 3]])) is None
    assert documents(position_ids=torch.tensor([[0, 1, 0, 1]])).tolist() == [[0, 0, 1, 1]]
    assert documents(document_ids=torch.tensor([[4, 4, 5, 5]])).tolist() == [[4, 4, 5, 5]]
