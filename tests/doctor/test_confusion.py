"""The confusion table counts names given, and is written between its marks."""

from types import SimpleNamespace

import pytest

from glassformer.doctor import confusion


def bug(name, also=()):
    return SimpleNamespace(id=f"a_{name}", diagnosis=name, also=also)


def test_the_table_counts_own_names_and_names_that_fit():
    results = [
        (bug("causal_leak"), "causal_leak"),
        (bug("causal_leak"), "healthy"),
        (bug("window", ("over_mask",)), "over_mask"),
    ]
    text = confusion.table(results)
    assert "| causal_leak | 2 | 1 | healthy (1) |" in text
    assert "1 of 3 planted bugs are named by their own name first, 2 by a name that fits." in text


def test_the_document_is_rewritten_between_its_marks(tmp_path, monkeypatch, capsys):
    page = tmp_path / "doctor.md"
    page.write_text(f"before\n{confusion.BEGIN}\nold\n{confusion.END}\nafter\n")
    monkeypatch.setattr(confusion, "zoo", lambda: [bug("window")])
    monkeypatch.setattr(confusion, "outcomes", lambda bugs: ((b, "window") for b in bugs))
    assert confusion.main(["--write", str(page)]) == 0
    text = page.read_text()
    assert "| window | 1 | 1 |" in text
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")


def test_without_the_zoo_it_says_where_it_is():
    with pytest.raises(SystemExit, match="run this from a checkout"):
        confusion.zoo([("no_such_package.zoo", "ZOO")])


def test_every_planted_bug_and_every_variant_is_counted():
    from tests.bugs.styles.variants import VARIANTS
    from tests.bugs.zoo import ZOO

    bugs = confusion.zoo()
    assert len({bug.id for bug in bugs}) == len(bugs) == len(ZOO) + len(VARIANTS)


def test_parts_are_joined_and_a_result_is_not_made_again(tmp_path, monkeypatch, capsys):
    bugs, seen = [bug("window"), bug("causal_leak"), bug("over_mask")], []
    page, results = tmp_path / "doctor.md", tmp_path / "results.jsonl"
    page.write_text(f"{confusion.BEGIN}\n{confusion.END}\n")
    monkeypatch.setattr(confusion, "zoo", lambda: bugs)
    monkeypatch.setattr(confusion, "outcomes", lambda some: ((seen.append(b.id), (b, b.diagnosis))[1] for b in some))
    confusion.main(["--results", str(results), "--part", "1/2"])
    assert seen == ["a_window", "a_over_mask"]
    with pytest.raises(SystemExit, match="1 bugs have no result"):
        confusion.main(["--results", str(results), "--part", "1/2", "--write", str(page)])
    confusion.main(["--results", str(results), "--write", str(page)])
    assert seen == ["a_window", "a_over_mask", "a_causal_leak"]
    assert "3 of 3 planted bugs" in page.read_text()


@pytest.mark.parametrize("part", ["0/2", "3/2", "two", "1/"])
def test_a_part_that_is_none_is_refused(part):
    with pytest.raises(SystemExit, match="K from 1 to N"):
        confusion.part_of([1, 2], part)
