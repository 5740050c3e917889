"""Anatomy: the diagram is to scale, tensors and cells are those of a trace."""

import re

import pytest
import torch

import glassformer as gf
from tests.studio.page import ROMEO, expect, needs_browser, panel, run_python, selection

pytestmark = needs_browser


def run_of(name, text, sites):
    model = gf.load(name).float()
    return gf.trace(model, torch.tensor([gf.load_tokenizer(name).encode(text).ids]), sites=sites)


def test_the_diagram_is_to_scale_and_a_block_unfolds(site):
    page = site.open(view="anatomy")
    page.wait_for_selector("[data-path='blocks.0.feedforward']")
    widths = {
        path: float(page.locator(f"[data-path='{path}'] .scale").get_attribute("width"))
        for path in ("embed", "blocks.0.attention", "blocks.0.feedforward", "blocks.1")
    }
    cfg = gf.load("bard").config
    counts = {
        "embed": cfg.vocab_size * cfg.d_model,
        "blocks.0.attention": 4 * cfg.d_model**2,
        "blocks.0.feedforward": 3 * cfg.d_model * cfg.d_ff,
    }
    counts["blocks.1"] = counts["blocks.0.attention"] + counts["blocks.0.feedforward"] + 2 * cfg.d_model
    for path, many in counts.items():
        assert widths[path] / widths["blocks.1"] == pytest.approx(many / counts["blocks.1"])
    page.locator("[data-path='blocks.3']").click()
    page.wait_for_selector("[data-path='blocks.3.attention'][aria-pressed=true]")
    assert page.locator("[data-path='blocks.0.attention']").count() == 0
    assert selection(page)["layer"] == "3"
    page.locator("[data-path='blocks.3.feedforward']").focus()
    page.keyboard.press("Enter")
    expect(panel(page, "part").locator("h2")).to_have_text("Feed-forward (blocks.3.feedforward)")
    assert panel(page, "part").locator("math").count() == 1
    assert page.locator("#inspector td").first.inner_text() == "decoder.blocks.3.feedforward.up.weight"


@pytest.mark.slow
def test_one_cell_is_the_sum_that_is_shown(site):
    page = site.open(view="anatomy", part="blocks.2.attention", layer=2, site="blocks.2.attention.scores", head=3)
    page.wait_for_selector("[data-panel=part][data-site='blocks.2.attention.scores']")
    canvas = panel(page, "part").locator("canvas[tabindex]")
    canvas.focus()
    for key in ["ArrowDown"] * 4 + ["ArrowRight"]:  # the first one enters the map
        page.keyboard.press(key)
    page.keyboard.press("Enter")
    cell = panel(page, "cell")
    expect(cell.locator("b.mono")).to_have_text(re.compile(r"scores\[3, 3, 1\] = "))
    value = float(run_of("bard", ROMEO, "blocks.2.attention.scores")["blocks.2.attention.scores"][0, 3, 3, 1])
    last = [float(t.replace("−", "-")) for t in cell.locator("tbody tr:nth-last-child(-n+2) b").all_inner_texts()]
    assert last == pytest.approx([value, value], rel=1e-5)
    assert float(run_python(page, "cell")) == value
    tensor = run_of("bard", ROMEO, "blocks.2.attention.scores")["blocks.2.attention.scores"][0, 3]
    torch.testing.assert_close(run_python(page, "part"), tensor)


@pytest.mark.parametrize(
    "name", ["pair", *(pytest.param(name, marks=pytest.mark.slow) for name in ("both", "induction"))]
)
def test_other_kinds_of_models_have_an_anatomy_too(site, name):
    text = {"induction": "ABAB"}.get(name, "3 1 4 1 5")
    page = site.open(view="anatomy", model=name, prompt=text)
    page.wait_for_selector("[data-panel=part][data-site]")
    names = page.locator(".diagram g[data-path]").evaluate_all("(all) => all.map((one) => one.dataset.path)")
    inside = {"pair": "decoder.blocks.0.cross", "both": "blocks.0.feedforward", "induction": "blocks.0.attention"}
    assert inside[name] in names
    assert any("feedforward" in path for path in names) == (name != "induction")
