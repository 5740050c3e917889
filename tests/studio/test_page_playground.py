"""Playground: the bars, the text and the tree on the page are those of the library."""

import re

import numpy as np
import pytest
import torch

import glassformer as gf
from glassformer.generation import Sampling, distribution
from tests.studio.page import ROMEO, expect, module, needs_browser, panel, run_python, selection, slide

pytestmark = needs_browser


@pytest.fixture(scope="module")
def bard():
    return gf.load("bard").float(), gf.load_tokenizer("bard")


def chances(bard, text, **sampling):
    """The distribution after a text, by the library: float64."""
    model, tokenizer = bard
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer.encode(text).ids]))[:, -1]
    return distribution(logits, Sampling(**sampling))[0]


def shown(page):
    """(word, percentage) of each bar; a token that was cut has 0."""
    rows = page.locator(".bar-row").all()
    texts = [(r.locator(".piece").inner_text(), r.locator(".p").inner_text()) for r in rows]
    return [(word, 0.0 if p.startswith("(") else float(p.removesuffix(" %"))) for word, p in texts]


CASES = [
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 1.9, "top_p": 0.6},
    {"temperature": 0.4, "top_k": 20, "top_p": 0.95, "min_p": 0.03},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 1.0, "min_p": 1.0},
]


def test_sampling_in_the_browser_is_the_librarys(site):
    page = site.open()
    generator = np.random.default_rng(3)
    logits = generator.normal(0, 3, 200).astype(np.float32)
    logits[[5, 9, 70]] = logits.max()  # ties, which have rules of their own
    logits[11:14] = np.sort(logits)[-19]
    body = "const l = Float32Array.from(v[0]); const got = m.distribution(l, m.ordered(l), v[1]);"
    for case in CASES:
        wanted = distribution(torch.tensor(logits)[None], Sampling(**case))[0].numpy()
        got = module(page, "sampling", body + "return [[...got.p], got.kept, got.entropy];", logits.tolist(), case)
        np.testing.assert_allclose(got[0], wanted, rtol=1e-12, atol=1e-15, err_msg=str(case))
        assert got[1] == np.count_nonzero(wanted)
        positive = wanted[wanted > 0]
        assert got[2] == pytest.approx(-(positive * np.log(positive)).sum(), abs=1e-12)


def test_bars_are_the_models_distribution_and_sliders_redraw_at_once(site, bard):
    page = site.open(view="playground")
    page.wait_for_selector("[data-panel=next][data-ready='27']")
    own = chances(bard, ROMEO)
    vocabulary = [bard[1].id_to_token(i).replace(" ", "·").replace("\n", "⏎") for i in range(65)]
    wanted = [(vocabulary[i], round(100 * float(own[i]), 2)) for i in own.argsort(descending=True, stable=True)[:18]]
    assert close(shown(page), wanted)
    slide(page, "Temperature", 0.5)
    slide(page, "Top-p", 0.9)
    left = chances(bard, ROMEO, temperature=0.5, top_p=0.9)
    order = own.argsort(descending=True, stable=True)[:18]
    assert close(shown(page), [(vocabulary[i], round(100 * float(left[i]), 2)) for i in order])
    assert float(panel(page, "next").get_attribute("data-redraw")) < 100
    result = run_python(page, "next")
    torch.testing.assert_close(result, left)


def close(got, wanted):
    """The same words, and percentages equal to the last digit shown."""
    assert [word for word, _ in got] == [word for word, _ in wanted]
    assert [p for _, p in got] == pytest.approx([p for _, p in wanted], abs=0.011)
    return True


@pytest.mark.slow
def test_a_chosen_token_asks_what_follows_it_and_a_bar_adds_its_token(site, bard):
    page = site.open(view="playground")
    page.wait_for_selector("[data-panel=next][data-ready='27']")
    page.locator("#tokens .chip").nth(5).click()
    page.wait_for_selector("[data-panel=next][data-ready='6']")
    best = bard[1].id_to_token(int(chances(bard, "ROMEO:").argmax()))
    page.locator(".bar-row").first.click()
    expect(page.locator("#tokens .chip")).to_have_count(7)
    assert selection(page)["prompt"] == "ROMEO:" + best
    assert "token" not in selection(page)


STOP_AT_THE_FIRST_TOKEN = """() => new MutationObserver((_, observer) => {
    const stop = [...document.querySelectorAll("button")].find(button => button.textContent === "Stop");
    if (document.querySelector(".written .new") && !stop.disabled) { observer.disconnect(); stop.click(); }
}).observe(document.body, {childList: true, subtree: true, attributes: true})"""
"""A click from outside may come after the last token."""


@pytest.mark.slow
def test_written_text_is_generates_and_can_be_stopped_and_kept(site, bard):
    model, tokenizer = bard
    page = site.open(view="playground")
    page.wait_for_selector("[data-panel=next][data-ready='27']")
    page.get_by_label("New tokens").fill("24")
    page.get_by_label("Seed").fill("7")
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.locator(".written .new")).to_have_count(24)
    ids = tokenizer.encode(ROMEO).ids
    wanted = gf.generate(model, [ids], 24, Sampling(), seed=7).new[0]
    assert page.locator(".written").inner_text() == ROMEO + tokenizer.decode(wanted)
    assert run_python(page, "generate") == wanted
    held = 2 * 6 * 160 * (27 + 24) * 4  # keys and values of 6 layers for every token, in float32
    expect(panel(page, "generate").locator(".tile b").nth(2)).to_have_text(f"{int(held / 1024 + 0.5)} KiB")
    page.get_by_role("button", name="Use as prompt").click()
    expect(page.locator("#tokens .chip")).to_have_count(27 + 24)
    page.get_by_label("New tokens").fill("200")
    page.get_by_label("KV cache").uncheck()
    page.evaluate(STOP_AT_THE_FIRST_TOKEN)
    page.get_by_role("button", name="Run", exact=True).click()
    page.wait_for_selector(".written .new")
    expect(page.get_by_role("button", name="Stop", exact=True)).to_be_disabled()
    assert 0 < page.locator(".written .new").count() < 200
    expect(panel(page, "generate").locator(".tile b").nth(2)).to_have_text("none")
    page.get_by_role("button", name="Clear").click()
    page.get_by_role("button", name="Step", exact=True).click()
    expect(page.locator(".written .new")).to_have_count(1)


@pytest.mark.slow
def test_a_chart_keeps_its_position_when_the_theme_and_then_the_window_change(site):
    page = site.open(view="playground")
    page.wait_for_selector("[data-panel=next][data-ready='27']")
    page.get_by_label("New tokens").fill("8")
    page.get_by_role("button", name="Run", exact=True).click()
    chart = panel(page, "generate").locator(".js-plotly-plot")
    chart.wait_for()
    page.wait_for_selector("button:enabled:text-is('Run')")
    for theme, width in (("dark", 400), ("light", 1280), ("dark", 700)):
        page.emulate_media(color_scheme=theme)
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(400)  # plotly follows a window after a moment
        box, below = chart.bounding_box(), page.get_by_role("button", name="Use as prompt").bounding_box()
        assert box["height"] > 150
        assert box["y"] + box["height"] <= below["y"]


@pytest.mark.slow
def test_the_beam_trees_filled_path_is_the_beam_searchs_text(site, bard):
    model, tokenizer = bard
    page = site.open(view="playground")
    page.wait_for_selector("[data-panel=next][data-ready='27']")
    page.get_by_role("button", name="Search", exact=True).click()
    page.wait_for_selector(".tree svg")
    wanted = gf.generate(model, [tokenizer.encode(ROMEO).ids], 6, beams=3).new[0]
    filled = page.locator(".tree g.best text:first-of-type").all_text_contents()
    assert [w.replace("·", " ").replace("⏎", "\n") for w in filled[1:]] == [tokenizer.id_to_token(i) for i in wanted]
    assert run_python(page, "beam") == wanted
    assert page.locator(".tree g.kept").count() == 1 + 6 * 3
    page.locator(".tree").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):  # enters at the prompt
        page.keyboard.press(key)
    assert page.locator(".tree g.pointed").count() == 1
    expect(page.locator("#inspector-title")).to_have_text(re.compile("Beam: ."))
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".tree g.pointed text").first).to_have_text("prompt")
