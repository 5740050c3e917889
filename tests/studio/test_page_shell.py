"""The frame of the page: selection in the address, tokens, themes, saving, tensors, no requests to other hosts."""

import base64
import contextlib
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

import glassformer as gf
from glassformer.studio.encoding import TensorResponse
from tests.studio.page import CHROMIUM, FLAGS, ROMEO, expect, module, needs_browser, panel, selection
from tests.studio.serving import serving

STATIC = Path(gf.__file__).parent / "studio" / "static"
SCRIPTS = sorted((STATIC / "js").glob("*.js"))


@pytest.mark.parametrize("path", [*SCRIPTS, *sorted(STATIC.glob("*.css")), STATIC / "index.html"], ids=lambda p: p.name)
def test_files_of_the_page_are_short_plain_and_self_contained(path):
    text = path.read_text()
    assert text.count("\n") <= 400
    assert max(map(len, text.splitlines())) <= 120
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
    elsewhere = set(re.findall(r"https?://[^\s\"'`)]+", text)) - {"http://www.w3.org/2000/svg"}
    assert not elsewhere, elsewhere
    if path.suffix == ".html":
        assert not re.search(r"<script>|\son\w+=|style=", text)


def test_what_the_first_view_imports_is_preloaded():
    """Each import that is not in the page's head costs a round trip before the page answers."""
    needed, waiting = set(), ["shell", "view-playground"]
    while waiting:
        name = waiting.pop()
        if name not in needed:
            needed.add(name)
            waiting += re.findall(r'(?:from|import) "\./([\w-]+)\.js"', (STATIC / "js" / f"{name}.js").read_text())
    response = re.findall(r'modulepreload" href="/static/js/([\w-]+)\.js"', (STATIC / "index.html").read_text())
    assert sorted(response) == sorted(needed - {"shell"})
    assert "plotly" not in (STATIC / "index.html").read_text()


@needs_browser
def test_the_prompt_becomes_the_tokenizers_tokens_and_is_never_html(site):
    page = site.open(view="playground")
    page.wait_for_selector(".chip")
    ids = gf.load_tokenizer("bard").encode(ROMEO).ids
    assert page.evaluate("(async () => (await import('/static/js/store.js')).store.ids)()") == ids
    page.fill("#prompt", "<img src=x onerror=boom()>")
    expect(page.locator("#prompt-hint")).to_have_text(re.compile(r".+\.$"))  # bard knows no < or >
    assert page.locator("main img, header img").count() == 0
    page.fill("#prompt", "ME: be")
    expect(page.locator("#tokens .chip")).to_have_count(6)
    expect(page.locator("#prompt-hint")).to_have_text("")
    assert all("400" in response for response in site.problems)  # the browser itself notes a refused request
    site.problems.clear()


@needs_browser
def test_the_selection_lives_in_the_address_and_back_goes_back(site):
    page = site.open(view="heads", model="induction", prompt="ABCABC", layer=1, head=1, token=2)
    page.wait_for_selector("glass-heads h2:text('Head 1.1')")
    page.click("nav a[data-view=stream]")
    page.wait_for_selector("glass-stream [data-panel=lens][data-ready]")
    assert selection(page) == {
        "view": "stream", "model": "induction", "prompt": "ABCABC", "layer": "1", "head": "1", "token": "2",
    }  # fmt: skip
    page.go_back()
    page.wait_for_selector("glass-heads:not([hidden])")
    assert page.locator("glass-stream").is_hidden()
    page.go_forward()
    page.wait_for_selector("glass-stream:not([hidden])")
    page.reload()
    page.wait_for_selector("glass-stream [data-panel=lens][data-ready]")
    assert page.input_value("#prompt") == "ABCABC"
    assert page.input_value("#model") == "induction"
    assert page.locator("#tokens .chip[aria-selected=true]").inner_text() == "C"


@needs_browser
def test_the_theme_is_switched_and_kept(site):
    page = site.open(theme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "light"


@pytest.mark.slow
@needs_browser
def test_while_torch_loads_the_state_is_polled_and_the_console_is_empty(site):
    page = site.open(view="playground")
    page.wait_for_selector("[data-panel=next][data-ready]")
    asked, states = [], iter(["loading", "loading"])

    def lens(route):
        asked.append(route.request.headers["prefer"])
        if len(asked) > 1:
            return route.continue_()
        return route.fulfill(status=202, json={"error": "torch is still being imported.", "loading": True})

    def state(route):
        response = route.fetch().json()
        return route.fulfill(json={**response, "torch": next(states, "ready")})

    page.route("**/api/lens", lens)
    page.route("**/api/state", state)
    page.click("nav a[data-view=stream]")
    expect(page.locator("#torch-status")).to_have_text("Importing torch …")
    page.wait_for_selector("glass-stream [data-panel=lens][data-ready]")
    expect(page.locator("#torch-status")).to_have_text("")
    assert asked == ["respond-async"] * 2  # once, and again when it was there
    assert next(states, None) is None


@pytest.mark.slow
@needs_browser
def test_another_model_resets_the_selection_and_going_back_restores_it(site):
    page = site.open(view="stream", model="bard", prompt="ROMEO: be", token=5, layer=4, head=3, answer="60")
    page.wait_for_selector("glass-stream [data-panel=lens][data-ready]")
    assert module(page, "store", "m.store.set({model: 'induction', prompt: 'ABAB'}); return m.store.ids;") == []
    page.wait_for_selector("glass-stream [data-panel=lens][data-ready='4']")
    assert selection(page) == {"view": "stream", "model": "induction", "prompt": "ABAB"}
    page.go_back()
    page.wait_for_selector("glass-stream [data-panel=lens][data-ready='9']")
    assert selection(page)["token"] == "5"


@pytest.mark.slow
@needs_browser
def test_an_encoder_decoder_has_a_field_for_its_answer_and_fills_it_itself(site):
    page = site.open(view="playground", model="pair", prompt="3 1 4 1 5")
    own = list(gf.generate(gf.load(site.folders["pair"]), [[3, 1, 4, 1, 5]], 24, gf.Sampling(0.0))[0])
    expect(page.locator("#target-tokens .chip")).to_have_count(len(own))
    page.wait_for_selector(f"[data-panel=next][data-ready='{len(own)}']")
    page.get_by_label("Decoder input").fill("0 7 9")
    page.wait_for_selector("[data-panel=next][data-ready='3']")
    page.locator("#target-tokens .chip").nth(1).click()
    page.wait_for_selector("[data-panel=next][data-ready='2']")
    for view, ready in (
        ("heads", "grid][data-drawn"),
        ("stream", "lens][data-ready='3'"),
        ("anatomy", "part][data-site"),
    ):
        page.click(f"nav a[data-view={view}]")
        page.wait_for_selector(f"[data-panel={ready}]")
    page.click("nav a[data-view=playground]")
    page.get_by_role("button", name="Run", exact=True).click()
    page.wait_for_selector("button:enabled:text-is('Use as prompt')")
    page.select_option("#model", "table")
    expect(page.locator("#target-field")).to_be_hidden()
    page.wait_for_selector("#target-strip", state="hidden")


@pytest.mark.slow
@needs_browser
def test_tensors_arrive_as_they_were_sent(site):
    page = site.open()
    values = np.array([[0.0, -1.5, 65504.0], [6e-8, np.inf, 1 / 3]])
    data = {
        "half": (values, "float16"),
        "full": (values[:, :1], "float32"),
        "whole": (np.array([1, -7, 2**31 - 1]), "int32"),
        "bytes": (np.array([0.0, 0.25, 1.0]), "uint8"),
    }
    sent = base64.b64encode(TensorResponse(data, {"pieces": ["a", "é"]}, {"bytes": (0.0, 1.0)}).encode()).decode()
    got = module(
        page, "tensors",
        "const buffer = Uint8Array.from(atob(v[0]), (c) => c.charCodeAt(0)).buffer;"
        "const { tensors, meta } = m.decode(buffer);"
        "const out = Object.fromEntries(Object.entries(tensors).map(([k, t]) => [k, [...t.floats()].map(String)]));"
        "return { ...out, meta, at: tensors.half.at(1, 2), row: [...tensors.half.part(1).data].map(String) };",
        sent,
    )  # fmt: skip
    assert [float(x) for x in got["half"]] == [float(np.float16(x)) for x in values.flatten()]
    assert got["row"][1] == "Infinity"
    assert got["at"] == float(np.float16(1 / 3))
    assert [float(x) for x in got["full"]] == [0.0, float(np.float32(6e-8))]
    assert got["whole"] == ["1", "-7", "2147483648"]  # as a float32
    assert [float(x) for x in got["bytes"]] == pytest.approx([0, 64 / 255, 1])
    assert got["meta"] == {"pieces": ["a", "é"]}


@needs_browser
@pytest.mark.parametrize(
    ("view", "name", "kind", "drawn"),
    [
        ("playground", "next", "svg", "[data-panel=next][data-ready]"),
        ("heads", "grid", "png", "[data-panel=grid][data-drawn]"),
        pytest.param("stream", "norms", "svg", "[data-panel=norms] .js-plotly-plot", marks=pytest.mark.slow),
    ],
)
def test_a_figure_is_saved_as_a_file_that_opens(site, view, name, kind, drawn):
    page = site.open(view=view)
    page.wait_for_selector(drawn)
    panel(page, name).locator("summary").click()
    with page.expect_download() as waiting:
        panel(page, name).get_by_role("button", name=kind.upper()).click()
    saved = Path(waiting.value.path()).read_bytes()
    assert waiting.value.suggested_filename == f"{name}.{kind}"
    if kind == "png":
        assert saved[:8] == b"\x89PNG\r\n\x1a\n"
        assert len(saved) > 2000
    else:
        root = ElementTree.fromstring(saved)
        assert root.tag.endswith("svg")
        assert float(root.attrib["width"]) > 200


@pytest.mark.slow
@needs_browser
def test_an_invalid_response_is_reported_and_the_page_continues(site):
    page = site.open(view="anatomy", model="no-such-model")
    page.wait_for_selector("glass-anatomy svg")  # a model that is not there gives way to the first
    assert selection(page)["model"] == "bard"
    page.evaluate(
        "document.dispatchEvent(new CustomEvent('glass-toast', {detail: {message: '<i>no</i>', kind: 'error'}}))"
    )
    assert page.locator(".toast p").inner_text() == "<i>no</i>"
    page.get_by_role("button", name="Dismiss").click()
    assert page.locator(".toast").count() == 0


@needs_browser
@pytest.mark.slow
def test_first_paint_comes_within_a_second_and_the_bars_within_two_while_torch_is_imported(browser, tmp_path):
    """The promise on an idle machine with two cores: a server just started, a browser that has never seen it.

    The second browser comes from the first one's driver, because playwright has one driver per thread.
    """
    fresh = browser.browser.browser_type.launch(executable_path=str(CHROMIUM), args=FLAGS)
    with serving(tmp_path) as server, contextlib.closing(fresh):
        page = fresh.new_page()
        page.goto(server.address)
        page.wait_for_selector("[data-panel=next][data-ready]")
        ready = page.evaluate("performance.now()")
        paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    assert paint < 1000
    assert ready < 2000
