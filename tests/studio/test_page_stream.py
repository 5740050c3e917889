"""Stream: the lens, the contributions, the norms and the patching on the page are the library's."""

import pytest
import torch

import glassformer as gf
from glassformer.lens import attribute_logits, logit_lens, patch_effects, stream_norms
from tests.studio.page import ROMEO, expect, needs_browser, panel, run_python, selection

pytestmark = needs_browser


@pytest.fixture(scope="module")
def bard():
    return gf.load("bard").float(), torch.tensor([gf.load_tokenizer("bard").encode(ROMEO).ids])


def test_the_lens_grid_is_the_logit_lens_and_a_cell_asks_for_its_contributions(site, bard):
    model, tokens = bard
    page = site.open(view="stream")
    page.wait_for_selector("[data-panel=lens][data-ready='27']")
    reading = logit_lens(model, tokens, top=5)
    tokenizer = gf.load_tokenizer("bard")
    words = [[tokenizer.id_to_token(i) for i in row] for row in reading.top[:, 0, :, 0].tolist()]
    rows = page.locator(".lens-grid tbody tr").all()
    for depth, row in enumerate(reversed(rows)):  # the deepest stands on top
        shown = [t.replace("·", " ").replace("⏎", "\n") for t in row.locator("td").all_inner_texts()]
        assert shown == words[depth]
    page.locator(".lens-grid td[data-depth='4'][data-position='9']").click()
    assert selection(page)["token"] == "9"
    answer = int(reading.top[4, 0, 9, 0])
    assert selection(page)["answer"] == str(answer)
    wanted = float(attribute_logits(model, tokens, answer, position=9).logit[0])
    page.wait_for_selector(f"[data-panel=attribution][data-logit^='{wanted:.3f}']")
    torch.testing.assert_close(run_python(page, "lens").top, reading.top)
    assert float(run_python(page, "attribution").logit[0]) == pytest.approx(wanted)


@pytest.mark.slow
def test_norms_by_depth_are_those_of_the_stream(site, bard):
    page = site.open(view="stream", token=4)
    page.wait_for_selector("[data-panel=norms] .js-plotly-plot .scatterlayer")
    drawn = panel(page, "norms").locator(".js-plotly-plot").evaluate("(one) => one.data.map((t) => [t.name, [...t.y]])")
    norms = stream_norms(*bard)
    assert drawn[0][0] == "residual stream"
    assert drawn[0][1] == pytest.approx(norms.stream[:, 0, 4].tolist(), rel=1e-5)
    assert [name for name, _ in drawn[1:]] == ["attention output", "feed-forward output"]
    names = panel(page, "rank").locator(".js-plotly-plot").evaluate("(one) => one.data.map((t) => t.name)")
    assert names[0] == "this model"
    assert any("theory" in name for name in names)


@pytest.mark.slow
def test_patching_draws_the_effect_map_and_refuses_unequal_texts_in_words(site):
    page = site.open(view="stream", model="induction", prompt="ABAB")
    page.wait_for_selector("[data-panel=lens][data-ready]")
    page.get_by_label("What is patched").select_option("attention.heads")
    page.get_by_role("button", name="Patch", exact=True).click()
    page.wait_for_selector("[data-panel=patch][data-ready='attention.heads']")
    result = run_python(page, "patch")
    model, tokenizer = gf.load("induction").float(), gf.load_tokenizer("induction")
    clean, corrupt = (torch.tensor([tokenizer.encode(t).ids]) for t in ("H7KQ2M8XB7KQ2", "H7KQ2D8XB7KQ2"))
    answer, wrong = (int(model(text)[0, -1].argmax()) for text in (clean, corrupt))
    wanted = patch_effects(model, clean, corrupt, answer, wrong, "attention.heads", each_position=False).effects
    torch.testing.assert_close(result, wanted)
    canvas = panel(page, "patch").locator("canvas[tabindex]")
    canvas.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    shown = panel(page, "patch").locator(".readout").inner_text()
    assert float(shown.split(": ")[1].replace("−", "-")) == pytest.approx(float(wanted[1, 0]), abs=6e-3)
    page.get_by_label("Second (corrupt) text").fill("7KQ")
    page.get_by_role("button", name="Patch", exact=True).click()
    expect(panel(page, "patch").locator(".status")).to_contain_text("same number of tokens")
