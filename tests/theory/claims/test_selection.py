"""A reader's words to claims: ids, chapters, errata, sources in any spelling."""

import pytest

from glassformer.theory.claims.registry import ClaimError, coverage, load_all
from glassformer.theory.claims.selection import find_sources, select


def cites(text):
    return [row.cite for row in find_sources(text)]


def test_every_source_is_found_by_its_own_name_in_any_case_and_spacing():
    for row in coverage():
        for spelling in (row.cite, row.cite.upper(), row.cite.lower().replace(". ", ".").replace(" (", "(")):
            assert row.cite in cites(spelling), spelling


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Bishop 12.1", ["Bishop 12.1"]),
        ("bishop12.13", ["Bishop 12.13 (a)", "Bishop 12.13 (b)"]),
        ("Chapter 13 exercise 9", ["Ch. 13 ex. 9"]),
        ("ch13 ex 6", ["Ch. 13 ex. 6 (a)", "Ch. 13 ex. 6 (b)"]),
        ("CSCI 5922 PS4 Q3b", ["CSCI 5922 PS4 Q3a, Q3b"]),
        ("csci 5922 ps4 q2a", ["CSCI 5922 PS4 Q2ai", "CSCI 5922 PS4 Q2aii"]),
        ("Solution manual ex. 1", ["Solution manual ex. 1"]),
        ("Topic 10 1.3", ["Topic 10 ex. 1.3 (a)", "Topic 10 ex. 1.3 (b)"]),
    ],
)
def test_a_source_is_found_by_its_beginning_never_by_half_a_number(text, expected):
    assert cites(text) == expected


@pytest.mark.parametrize("text", ["Bishp 12.3", "Bishop 12.99", "Topic 11 ex. 3"])
def test_an_unknown_source_names_the_nearest(text):
    with pytest.raises(ClaimError, match=r"Did you mean '\w.*'"):
        find_sources(text)


@pytest.mark.parametrize("text", ["", "...", "Knuth"])
def test_a_source_like_nothing_is_refused_without_a_guess(text):
    with pytest.raises(ClaimError, match=r"shows all\.$"):
        find_sources(text)


def test_names_are_claims_chapters_and_errata():
    assert select(["rope-relative"]) == ["rope-relative"]
    assert select(["example"]) == [id for id, claim in load_all().items() if claim.chapter == "example"]
    assert select(["E30"]) == select(["e30"]) == ["rope-relative"]
    assert select(["E54"]) == ["softmax-row-stochastic", "attention-output-convex-hull"]
    assert select(["E54b"]) == ["attention-output-convex-hull"]


def test_everything_comes_once_and_in_the_order_of_the_registry():
    assert select() == list(load_all())
    assert select(["heads", "multihead-separation", "weights"]) == select(["weights", "heads"])
    assert select(["rope-relative"], source="Bishop 12.1") == ["convex-weights-upper-bound", "rope-relative"]


def test_an_absent_exercise_is_found_through_its_erratum():
    assert select(source="Bishop 12.14") == ["greedy-vs-best"]


@pytest.mark.parametrize("name", ["E1", "E99", "rope relative", "multihead"])
def test_an_unknown_name_is_refused(name):
    with pytest.raises(ClaimError, match="there is no claim, chapter or erratum"):
        select([name])
