"""Tables of counts."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from glassformer.theory.claims.claim import Lab
from glassformer.theory.claims.probability import ngrams
from glassformer.training.data.ngram import count


def test_the_numbers_of_the_contract():
    assert len(ngrams.strings()) == 3515
    found = {p.id: p.evidence for p in ngrams.final_token(Lab())}
    assert found["without the final token every row sums to 1"]["cases"] == 22048
    assert found["with it, the last context is short by one count"]["cases"] == 7030
    assert found["A B A"]["probability_ratio_A_after_B"] == "3/2"
    stored = {p.id: p.evidence for p in ngrams.storage(Lab())}
    assert stored["averaging conditionals is not merging"]["merged"] == "1/4"


@pytest.mark.parametrize(("vocabulary", "length"), [(2, 1), (2, 4), (3, 3), (4, 2)])
def test_a_de_bruijn_text_holds_every_gram_once(vocabulary, length):
    found = ngrams.grams(ngrams.de_bruijn(vocabulary, length), length)
    assert len(found) == vocabulary**length
    assert set(found.values()) == {1}


def test_tables_are_decoded_to_the_grams_they_count():
    text = (0, 1, 0, 0, 1, 2)
    for length in (1, 2, 3):
        assert ngrams.decode(count(np.array(text), 3, 3), length, 3) == ngrams.grams(text, length)


def test_row_sums_by_hand():
    assert ngrams.row_sums((0, 1, 0), 2, omit=False) == {(0,): Fraction(1, 2), (1,): Fraction(1)}
    assert ngrams.row_sums((0, 1, 0), 2, omit=True) == {(0,): Fraction(1), (1,): Fraction(1)}
    assert ngrams.grams((0, 0, 0), 2) == Counter({(0, 0): 2})


def test_counting_the_final_token_in_our_tables_fails(monkeypatch):
    def kept(tables, length):
        table = tables[length - 1]
        return table.counts, tables[length - 2].counts[table.prefix]

    monkeypatch.setattr(ngrams, "ratio", kept)
    assert not ngrams._ours(Lab()).passed
