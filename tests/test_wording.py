"""Words that messages share."""

from glassformer.wording import plural


def test_a_noun_agrees_with_its_count():
    assert [plural(n, "claim") for n in (0, 1, 2, 1200)] == ["0 claims", "1 claim", "2 claims", "1,200 claims"]
    assert [plural(n, "piece of evidence", "pieces of evidence") for n in (1, 3)] == [
        "1 piece of evidence",
        "3 pieces of evidence",
    ]
