"""The sheet as a person reads it."""

import dataclasses
import re

import pytest

from glassformer.config import presets
from glassformer.sizing import size
from glassformer.sizing.text import byte_unit, flop_unit, quantity
from tests.pages.hostile import HOSTILE, assert_escaped, assert_static_fragment


def test_the_sheet_of_gpt2_has_the_numbers_and_their_formulas():
    text = size(presets.gpt2()).text()
    for line in (
        "decoder: L = 12, D = 768, H = 12, K = 64, F = 3,072, V = 50,257",
        "for B = 1 sequence of T = 1,024 tokens, float32, optimizer adamw",
        "124,439,808      124.4 M",
        "31.0%   V·D = 50,257·768",
        "4·D² + 4·D = 4·768² + 4·768 = 2,362,368 × 12 blocks",
        "tied: the matrix of the embedding",
        "6·active parameters·tokens = 6·124,439,808·1,024; 87% of the count",
        "L·G·(K + U)·bytes = 12·12·(64 + 64)·4",
    ):
        assert line in text


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", presets.ALL)
def test_columns_are_aligned_and_shares_add_up(name):
    text = size(presets.get(name)).text()
    rows = [line for line in text.splitlines() if line.startswith("  ")]
    exact = [re.match(r"  \S.*?\s{2,}([\d,]+)  ", line + "  ") for line in rows]
    assert all(exact)
    assert len({match.end(1) for match in exact if match}) == 1
    parameters = text.split("FLOPs")[0]
    shares = [float(share) for share in re.findall(r"([\d.]+)%", parameters)]
    assert sum(shares) == pytest.approx(100, abs=0.3)  # each is rounded to 0.1


@pytest.mark.parametrize("name", ["gpt2", "t5_small", "mixtral_8x7b"])
def test_in_a_narrow_terminal_formulas_stand_below_their_numbers_and_nothing_is_lost(name):
    sheet = size(presets.get(name), batch=8)
    narrow = sheet.text(80)
    assert max(len(line) for line in narrow.splitlines()) <= 80
    assert narrow.split() == sheet.text().split()
    assert len(narrow.splitlines()) > len(sheet.text().splitlines())
    assert sheet.text(200) == sheet.text()


def test_what_a_model_does_not_have_is_not_on_its_sheet():
    encoder = size(presets.bert_base()).text()
    assert "cache" not in encoder
    assert "decoded" not in encoder
    assert "masked" not in encoder  # nothing is hidden from an encoder
    assert "cross" not in size(presets.gpt2()).text()
    assert "active  " not in size(presets.gpt2()).text()
    assert "2 of 8 experts" in size(presets.mixtral_8x7b()).text()
    assert "S = 20 source tokens" in size(presets.t5_small(), source=20).text()
    assert "a windowed layer keeps 4,096" in size(presets.mistral_7b()).text()


def test_a_context_that_cannot_run_is_stated_in_one_line_and_others_are_not():
    config = presets.gpt2()
    text = size(config, context=100_000).text()
    [line] = [line for line in text.splitlines() if "learned position table" in line]
    assert line == "Note: 100,000 tokens cannot run: the learned position table has only 1,024 positions."
    [line] = [line for line in size(presets.llama2_7b(), context=4097).text().splitlines() if "Note" in line]
    assert line == "Note: 4,097 tokens exceed the model's maximum context of 4,096: `generate` rejects them."
    for fits in (size(config, context=1024), size(config, context=12), size(presets.t5_small(), context=100_000)):
        assert "Note" not in fits.text()


def test_units():
    assert [quantity(n) for n in (0, 999, 1000, 124_439_808, 8e9, 2e15)] == [
        "0",
        "999",
        "1 k",
        "124.4 M",
        "8 B",
        "2000 T",
    ]
    assert flop_unit(1.2e24) == "1.2 YFLOP"
    assert [byte_unit(n) for n in (512, 1024, 497_759_232)] == ["512 B", "1 KiB", "474.7 MiB"]


@pytest.mark.parametrize("name", ["gpt2", "t5_small", "bert_base"])
def test_the_display_in_a_notebook_has_every_row_of_the_text(name):
    sheet = size(presets.get(name), context=4_096)
    words = " ".join(" ".join(assert_static_fragment(sheet._repr_html_(), 30_000).text).split())
    for line in sheet.text().splitlines():
        assert " ".join(line.split()) in words, line


def test_hostile_text_is_shown_as_text_in_a_notebook():
    sheet = size(presets.gpt2())
    made = {word: dataclasses.replace(sheet, notes=(word,))._repr_html_() for word in (HOSTILE, "word")}
    assert_escaped(made[HOSTILE], made["word"])
