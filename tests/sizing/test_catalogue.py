"""Every preset and device is listed, with the numbers that sizing itself uses."""

import re

import pytest

from glassformer.config import presets
from glassformer.sizing import DEVICES, count
from glassformer.sizing.catalogue import Catalogue, summary


@pytest.mark.parametrize("name", presets.ALL)
def test_a_summary_is_one_sentence_or_more_without_the_count(name):
    line = summary(name)
    assert "parameters" not in line
    assert "active." not in line
    assert line[0].isupper() or line.startswith(("nanoGPT", "`"))
    assert re.search(r"[a-z)]\.$|[0-9]\.$", line)
    assert not re.search(r"[,:.]{2}|\s[,:.]", line)


def test_text_page_and_dict_list_the_same():
    found = Catalogue()
    result = found.to_dict()
    assert [row["name"] for row in result["presets"]] == list(presets.ALL)
    assert [row["name"] for row in result["devices"]] == list(DEVICES)
    text, page = found.text(), found.page()
    for row in result["presets"]:
        assert row["parameters"] == count(presets.get(row["name"]))
        assert re.search(rf"^  {row['name']} +{row['parameters']:,}   {re.escape(row['summary'])}$", text, re.MULTILINE)
        assert f"| `{row['name']}` | {row['parameters']:,} | {row['summary']} |" in page
    for row in result["devices"]:
        figures = rf"{row['peak_flops'] / 1e12:,.4g} +{row['memory_gb']} +{row['bandwidth'] / 1e9:,.0f} "
        assert re.search(rf"^  {row['name']} +{figures}", text, re.MULTILINE)
        assert row["source"] in text
        assert row["source"] in page
    assert [row["name"] for row in result["devices"] if row["measured"]] == ["h200"]


def test_what_was_not_measured_is_called_assumed():
    for text in (Catalogue().text(), Catalogue().page()):
        assert "Only the H200 was measured." in text
        assert text.count("assumed") == len(DEVICES) - 1


@pytest.mark.parametrize("width", [40, 80])
def test_it_fits_a_narrow_terminal_and_loses_nothing(width):
    wide, narrow = Catalogue().text(), Catalogue().text(width)
    assert max(map(len, narrow.splitlines())) <= width
    assert sorted(narrow.split()) == sorted(wide.split())
