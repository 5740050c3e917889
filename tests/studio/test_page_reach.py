"""Reach and beauty: keyboard, focus, motion and colours, held by tests where they can be."""

import itertools
import re

import numpy as np
import pytest

from tests.studio.page import REPEAT, STATIC, VIEWS, fits, needs_browser

CSS = "\n".join(path.read_text() for path in sorted(STATIC.glob("*.css")))
READY = {
    "playground": "[data-panel=next][data-ready]",
    "anatomy": "[data-panel=part][data-site]",
    "heads": "[data-panel=scores] tbody tr",
    "stream": "[data-panel=rank][data-ready]",
    "positions": "[data-panel=positions-rotary][data-ready]",
    "theory": ".claim-figure svg",
    "course": "[data-panel=problem][data-ready]",
    "train": "button:enabled:text-is('Start training')",
    "doctor": "[data-panel=chinchilla][data-ready]",
}


def theme(name):
    """The custom properties of a theme, as the stylesheet gives them."""
    start = CSS.index(":root {") if name == "light" else CSS.index(':root[data-theme="dark"]')
    body = CSS[CSS.index("{", start) + 1 : CSS.index("}", start)]
    return dict(re.findall(r"--([\w-]+):\s*(#[0-9a-f]+)", body))


def rgb(text):
    digits = text[1:] if len(text) == 7 else "".join(2 * digit for digit in text[1:])
    return np.array([int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)])


def linear(text):
    colour = rgb(text)
    return np.where(colour <= 0.04045, colour / 12.92, ((colour + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    """WCAG 2: (L1 + 0.05) / (L2 + 0.05)."""
    light, dark = sorted((float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (one, other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("name", ["light", "dark"])
def test_text_is_readable_on_every_ground(name):
    """4.5 to 1 for text, 3 to 1 for lines of charts (WCAG 2.2, 1.4.3 and 1.4.11)."""
    colours = theme(name)
    for ink, ground in itertools.product(("ink", "soft", "accent", "good", "bad", "orange"), ("paper", "panel")):
        assert contrast(colours[ink], colours[ground]) >= 4.5 - (ink == "orange") * 0.5, (ink, ground)
    assert contrast(colours["accent"], colours["wash"]) >= 4.0
    assert contrast(colours["ink"], colours["wash"]) >= 7
    assert contrast(colours["on-accent"], colours["accent"]) >= 4.5
    for number in range(1, 8):
        assert contrast(colours[f"series-{number}"], colours["paper"]) >= 3


# Viénot, Brettel and Mollon 1999: what a dichromat sees, on linear RGB
BLIND = {
    "protan": [[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]],
    "deutan": [[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]],
}


def lab(colour):
    """CIE L*a*b* of a linear RGB colour under D65."""
    matrix = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = matrix @ np.clip(colour, 0, 1) / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("name", ["light", "dark"])
def test_colour_blind_readers_can_distinguish_the_lines_of_a_chart(name):
    """The first three series and good against bad: a difference of 12 is seen at a glance (2.3 is just noticed)."""
    colours = theme(name)
    pairs = [*itertools.combinations(["series-1", "series-2", "series-3"], 2), ("accent", "orange"), ("good", "orange")]
    for kind, matrix in BLIND.items():
        for one, other in pairs:
            seen = [lab(np.array(matrix) @ linear(colours[c])) for c in (one, other)]
            assert np.linalg.norm(seen[0] - seen[1]) > 12, (kind, one, other)


def test_nothing_moves_for_longer_than_300_ms():
    times = re.findall(r"(?<![\w.-])(\d*\.?\d+)(ms|s)\b", re.sub(r"/\*.*?\*/", "", CSS, flags=re.S))
    assert times
    assert max(float(value) * (1 if unit == "ms" else 1000) for value, unit in times) <= 300
    scripts = "\n".join(path.read_text() for path in (STATIC / "js").glob("*.js"))
    assert not re.search(r"behavior: \"smooth\"|\.animate\(", scripts)


@needs_browser
def test_who_wants_no_motion_gets_none(site):
    page = site.open(view="playground")
    page.emulate_media(reduced_motion="reduce")
    page.wait_for_selector(READY["playground"])
    moving = """() => [...document.querySelectorAll('*')].filter((one) => {
      const style = getComputedStyle(one);
      return parseFloat(style.transitionDuration) > 0 || style.animationName !== 'none';
    }).length"""
    assert page.evaluate(moving) == 0
    page.emulate_media(reduced_motion="no-preference")
    assert page.evaluate(moving) > 0  # the test can see motion


NAMELESS = """() => [...document.querySelectorAll(
    'button, a, input, select, textarea, canvas[tabindex], [role=button]')].filter((one) => {
  if (!one.offsetParent && !(one instanceof SVGElement)) return false;
  return !(one.getAttribute('aria-label') || one.textContent.trim() || one.labels?.[0]?.textContent);
}).map((one) => one.outerHTML.slice(0, 90))"""
# what Tab must reach: of a group (chips, a grid) its one entry
TABBABLE = """() => [...document.querySelectorAll(
    'a[href], button, input, select, textarea, summary, [tabindex]')].filter((one) =>
  one.tabIndex >= 0 && !one.disabled && one.checkVisibility({visibilityProperty: true}) && one.id !== 'main')"""
VISIBLE_FOCUS = """() => {
  const one = document.activeElement;
  if (!one || one === document.body) return null;
  one.dataset.tabbed = '1';
  const inside = one instanceof SVGElement ? one.querySelector('rect') : one;
  const style = getComputedStyle(inside);
  const seen = style.outlineStyle !== 'none' || (one instanceof SVGElement && style.strokeDasharray !== 'none');
  return [seen, one.outerHTML.slice(0, 100)];
}"""


@pytest.mark.slow
@needs_browser
def test_the_keyboard_reaches_every_control_and_shows_where_it_is(site):
    page = site.open(view="playground", model="induction", prompt=REPEAT)
    for view in VIEWS:
        page.click(f"nav a[data-view={view}]")
        page.wait_for_selector(READY[view])
        page.wait_for_function("!document.querySelector('main .busy')")
        page.evaluate("document.querySelectorAll('[data-tabbed]').forEach((one) => delete one.dataset.tabbed)")
        assert page.evaluate(NAMELESS) == [], view
        assert walked(page) == [], view
    page.reload()
    page.wait_for_selector(READY["doctor"])
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"


def walked(page):
    """Press Tab until all was reached: what was not."""
    # the long lists of one kind are one way each: five of them stand for all
    page.evaluate("""() => document.querySelectorAll('.claim-list a, .bars button, .diagram g[tabindex]')
      .forEach((one, i) => i > 4 && one.setAttribute('tabindex', '-1'))""")
    wanted = page.evaluate(f"({TABBABLE})().length")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Tab")
    for _ in range(wanted + 20):
        response = page.evaluate(VISIBLE_FOCUS)
        if response is None:  # the end of the page: once more from its beginning
            page.keyboard.press("Tab")
            continue
        assert response[0], f"no focus is to be seen: {response[1]}"
        page.keyboard.press("Tab")
    return page.evaluate(
        f"({TABBABLE})().filter((one) => !one.dataset.tabbed).map((one) => one.outerHTML.slice(0, 100))"
    )


@pytest.mark.slow
@needs_browser
def test_no_view_is_wider_than_the_window_at_400_pixels_and_no_text_is_tiny(site):
    page = site.open(width=400, view="playground", model="induction", prompt=REPEAT)
    small = """() => [...document.querySelectorAll('main *, header *, nav *')].filter((one) =>
      one.checkVisibility() && !one.closest('svg') && [...one.childNodes].some((n) => n.nodeType === 3 && n.data.trim())
      && parseFloat(getComputedStyle(one).fontSize) < 9.5).map((one) => one.outerHTML.slice(0, 80))"""
    for view in VIEWS:
        page.click(f"nav a[data-view={view}]")
        page.wait_for_selector(READY[view])
        assert fits(page, 400), view
        assert page.evaluate(NAMELESS) == [], view
        assert page.evaluate(small) == [], view
