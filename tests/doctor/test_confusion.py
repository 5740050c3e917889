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
        confusion.zoo("no_such_package.zoo")
