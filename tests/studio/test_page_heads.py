"""Heads: what is drawn is the trace's attention; ablation and scores are the library's; many heads at once."""

import pytest
import torch

import glassformer as gf
from glassformer.lens import zero
from glassformer.lens.heads import head_table
from tests.studio.page import REPEAT, expect, module, needs_browser, panel, run_python, selection

pytestmark = needs_browser


@pytest.fixture(scope="module")
def induction():
    return gf.load("induction").float(), torch.tensor([gf.load_tokenizer("induction").encode(REPEAT).ids])


def open_heads(site, **more):
    page = site.open(view="heads", model="induction", prompt=REPEAT, layer=1, head=0, **more)
    page.wait_for_selector("[data-panel=grid][data-drawn]")
    return page


@pytest.mark.slow
def test_the_large_map_reads_the_traces_attention_and_a_click_locks_the_query(site, induction):
    model, tokens = induction
    page = open_heads(site)
    pattern = gf.trace(model, tokens, sites="blocks.1.attention.pattern")["blocks.1.attention.pattern"][0, 0]
    canvas = panel(page, "head").locator("canvas[tabindex]")
    canvas.focus()
    for key in ["ArrowDown"] * 13 + ["ArrowRight"] * 5:
        page.keyboard.press(key)
    shown = panel(page, "head").locator(".readout").inner_text()
    assert shown.startswith("2 → M: ")
    assert float(shown.split(": ")[1]) == pytest.approx(float(pattern[12, 5]), abs=1 / 255)
    page.keyboard.press("Enter")
    assert selection(page)["token"] == "12"
    page.keyboard.press("ArrowUp")  # locked: the strip stays with the query
    weights = page.locator("#inspector td:last-child").all_inner_texts()
    assert float(weights[0].removesuffix(" %")) / 100 == pytest.approx(float(pattern[12].max()), abs=1 / 255)
    torch.testing.assert_close(run_python(page, "head"), pattern)
    assert run_python(page, "grid").shape == (2, 2, 13, 13)


def test_lines_are_drawn_for_short_texts_and_the_grid_takes_the_keyboard(site):
    page = open_heads(site)
    panel(page, "head").get_by_role("button", name="lines").click()
    assert panel(page, "head").locator(".lines line").count() > 15
    page.locator(".grid-wrap canvas").focus()
    page.keyboard.press("ArrowRight")
    expect(panel(page, "head").locator("h2")).to_have_text("Head 1.1")
    page.keyboard.press("ArrowUp")
    expect(panel(page, "head").locator("h2")).to_have_text("Head 0.1")
    assert selection(page)["layer"] == "0"


def test_an_ablated_head_changes_the_prediction_as_in_the_library(site, induction):
    model, tokens = induction
    page = open_heads(site)
    page.get_by_role("button", name="Ablate head 1.0").click()
    page.locator(".grid-wrap canvas").focus()
    page.keyboard.press("ArrowRight")
    page.get_by_role("button", name="Ablate head 1.1").click()
    expect(page.get_by_role("heading", name="Without 1.0, 1.1")).to_be_visible()
    before = model(tokens)[0, -1].detach().double().log_softmax(-1)
    after = (
        gf.patch(model, tokens, {"blocks.1.attention.heads": zero(heads=[0, 1])})[0, -1]
        .detach()
        .double()
        .log_softmax(-1)
    )
    kl = float((before.exp() * (before - after)).sum())
    assert float(panel(page, "ablate").get_attribute("data-kl")) == pytest.approx(kl, rel=1e-5)
    torch.testing.assert_close(run_python(page, "ablate").double(), after.exp(), rtol=1e-4, atol=1e-6)
    page.get_by_role("button", name="Restore all").click()
    expect(page.get_by_role("heading", name="Whole model")).to_have_count(0)


def test_scores_are_the_head_tables_and_sort(site, induction):
    page = open_heads(site)
    rows = panel(page, "scores").locator("tbody tr")
    expect(rows).to_have_count(4)
    table = head_table(induction[0], seed=0)
    assert rows.first.get_attribute("data-head") == "{0.layer}.{0.head}".format(table.ranked("induction").rows[0])
    panel(page, "scores").get_by_role("button", name="previous token").click()
    best = table.ranked("previous_token").rows[0]
    assert rows.first.get_attribute("data-head") == f"{best.layer}.{best.head}"
    rows.first.get_by_role("button").click()
    expect(panel(page, "head").locator("h2")).to_have_text(f"Head {best.layer}.{best.head}")


@pytest.mark.slow
def test_an_encoder_decoder_shows_each_of_its_attentions(site):
    page = site.open(view="heads", model="pair", prompt="3 1 4 1 5")
    page.wait_for_selector("[data-panel=grid][data-drawn]")
    page.get_by_label("Which attention").select_option("cross")
    expect(panel(page, "grid").locator("select")).to_have_value("cross")
    page.wait_for_selector("[data-panel=grid]:not(.busy)")
    first = panel(page, "head").locator("canvas[tabindex]")
    first.focus()
    page.keyboard.press("ArrowDown")
    for _ in range(9):
        page.keyboard.press("ArrowRight")
    expect(panel(page, "head").locator(".readout")).to_contain_text("→ #5:")  # the last token of the source


@pytest.mark.slow
def test_144_heads_of_512_tokens_are_drawn_within_a_second(site):
    page = site.open(view="heads")
    page.wait_for_selector("[data-panel=grid][data-drawn]")
    spent = module(
        page,
        "head-grid",
        """const { Tensor } = await import('/static/js/tensors.js');
        const data = new Uint8Array(144 * 512 * 512);
        for (let i = 0; i < data.length; i += 7) data[i] = (i * 31) & 255;
        const grid = new m.HeadGrid({});
        document.querySelector('glass-heads').append(grid.root);
        const begin = performance.now();
        grid.draw(new Tensor('pattern', 'U8', [12, 12, 512, 512], data));
        grid.canvas.getContext('2d').getImageData(0, 0, 1, 1);
        return performance.now() - begin;""",
    )
    assert spent < 1000


def test_a_small_map_keeps_a_diagonal_one_token_wide(site):
    page = site.open()
    body = """const n = 300, data = new Uint8Array(n * n);
    for (let t = 1; t < n; t++) data[t * n + t - 1] = 200;
    const { data: out, rows, columns } = m.pooled(data, n, n, 32);
    const on = [...Array(rows).keys()].every((r) => out[r * columns + r] === 200);
    const off = [...out].filter((v) => v === 200).length;
    return [rows, columns, on, off];"""
    rows, columns, on, lit = module(page, "head-grid", body)
    assert (rows, columns, on) == (32, 32, True)
    assert lit <= 2 * 32
