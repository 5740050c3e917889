"""The view "Positions": five schemes as the engine computes them, and sliders that move them."""

import json

import numpy as np
import pytest
import torch

import glassformer as gf
from glassformer.model import positions
from tests.studio.page import fits, needs_browser, panel, run_python, slide

pytestmark = [needs_browser, pytest.mark.usefixtures("well_behaved")]
SCHEMES = ("sinusoidal", "rotary", "alibi", "t5", "learned")
FIRST = {
    "Width D": 64,
    "Length T": 128,
    "Rotated pair": 4,
    "Offset": -8,
    "Base": float(np.log(10000)),
}
OPENED = ('"width":64', '"length":128', '"pair":4', '"base":10000,')


@pytest.fixture(scope="module")
def table(model_folders):
    """The learned table of the model `table`; the bundled ones have none."""
    return gf.load(model_folders[3]).decoder.position.weight.detach()


@pytest.fixture(scope="module")
def page(browser):
    """One page for all tests: plotly.js is large."""
    return browser.open(view="positions", model="table", prompt="3 1 4")


@pytest.fixture(autouse=True)
def _as_it_opens(page):
    """Every test begins with the page as it opens."""
    for label, value in FIRST.items():
        slide(page, label, value)
    page.locator("[data-panel=positions-rotary]" + "".join(f"[data-ready*='{part}']" for part in OPENED)).wait_for()


def shown(page, kind):
    """What a scheme's panel shows: the request behind it, its curves, the shape of its map."""
    found = panel(page, f"positions-{kind}")
    found.and_(page.locator("[data-ready]")).wait_for()
    asked = json.loads(found.get_attribute("data-ready"))
    curves = found.locator(".chart").evaluate("node => node.data.map((one) => [[...one.x], [...one.y]])")
    shape = found.locator(".plain-canvas").evaluate("node => [node.height, node.width]")
    return asked, np.array(curves, dtype=float), shape


def cell(page, kind, row, column):
    """The value that the read-out names when the arrow keys stand on a cell."""
    found = panel(page, f"positions-{kind}")
    found.locator(".plain-frame").blur()
    found.locator(".plain-frame").focus()
    for key, times in (("ArrowDown", row), ("ArrowRight", column)):
        for _ in range(times):
            page.keyboard.press(key)
    response = found.locator(".readout").inner_text()
    return float(response.rpartition(": ")[2].replace("−", "-")), response


def test_every_scheme_shows_the_engines_numbers(page, table, model_folders):
    asked, curves, shape = shown(page, "sinusoidal")
    waves = positions.sinusoids(torch.arange(255), 64, gf.config.Sinusoidal()).double()
    assert shape == [128, 64]
    assert asked["width"] == 64
    np.testing.assert_array_equal(curves[0, 0], np.arange(-127, 128))
    np.testing.assert_allclose(curves[0, 1], (waves @ waves[127] / 32).numpy(), atol=1e-6)
    value, response = cell(page, "sinusoidal", 3, 2)
    assert response.startswith("position 3, component 2")
    assert value == pytest.approx(float(waves[3, 2]), abs=1e-3)

    _, curves, shape = shown(page, "alibi")
    slopes = np.array(positions.alibi_slopes(8))
    assert shape == [128, 128]
    np.testing.assert_allclose(curves[:, 1], -slopes[:, None] * np.abs(np.arange(-127, 128)), rtol=1e-6)
    assert cell(page, "alibi", 5, 1)[0] == pytest.approx(-4 * slopes[0], rel=1e-3)

    asked, curves, _ = shown(page, "t5")
    assert asked["model"] == "pair"  # the one here that has trained biases
    biases = gf.load(model_folders[2]).decoder.position
    buckets = positions.t5_buckets(torch.arange(-127, 128), biases.spec, causal=True)
    np.testing.assert_allclose(curves[:, 1], biases.weight.detach()[buckets].T.numpy(), rtol=1e-6)

    asked, _, shape = shown(page, "learned")
    assert asked["model"] == "table"
    assert shape == [48, 24]
    assert cell(page, "learned", 7, 4)[0] == pytest.approx(float(table[7, 4]), rel=5e-3)


def test_the_rotation_is_that_of_the_offset_and_the_pair(page):
    shown(page, "rotary")
    for kind in ("rotary", "sinusoidal"):
        assert (
            panel(page, f"positions-{kind}")
            .locator(".turn p")
            .first.inner_text()
            .startswith("pair 4: −8 × 0.316 = −2.53 rad")
        )
    tip = panel(page, "positions-rotary").locator(".dial-to-end")
    angle = -8 * 10000 ** (-2 * 4 / 64)
    assert float(tip.get_attribute("cx")) == pytest.approx(70 + 56 * np.cos(angle), abs=1e-6)
    assert float(tip.get_attribute("cy")) == pytest.approx(70 - 56 * np.sin(angle), abs=1e-6)
    assert panel(page, "positions-alibi").locator(".dial").count() == 0


@pytest.mark.slow
def test_sliders_ask_again_and_a_narrow_width_keeps_its_pair(page):
    shown(page, "rotary")
    slide(page, "Rotated pair", 20)
    slide(page, "Length T", 40)
    slide(page, "Width D", 16)
    changed = page.locator("[data-panel=positions-rotary][data-ready*='\"width\":16']")
    changed.wait_for()
    asked, curves, shape = shown(page, "rotary")
    assert (asked["pair"], asked["length"]) == (7, 40)  # 16 components are 8 pairs
    assert shape == [40, 8]
    assert curves.shape[-1] == 79
    slide(page, "Base", float(np.log(100)))
    page.locator("[data-panel=positions-rotary][data-ready*='\"base\":100,']").wait_for()
    assert "0.0178" in panel(page, "positions-rotary").locator(".turn p").first.inner_text()  # 100^(-14/16)


def test_copy_as_python_gives_the_numbers_on_screen(page, table):
    for kind in SCHEMES:
        _, _, (rows, columns) = shown(page, kind)
        result = run_python(page, f"positions-{kind}")
        assert tuple(result.shape)[-2:] == (rows, columns)
        assert cell(page, kind, 2, 1)[0] == pytest.approx(float(result.detach()[..., 2, 1]), rel=5e-3, abs=1e-3)


@pytest.mark.slow
def test_nothing_is_wider_than_the_window_at_either_width(page):
    for width, theme in ((400, "dark"), (1280, "light")):
        page.emulate_media(color_scheme=theme)
        page.set_viewport_size({"width": width, "height": 900})
        assert fits(page, width)
