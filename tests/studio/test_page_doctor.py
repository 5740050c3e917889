"""The view "Doctor, size": an examination as it comes, a diagnosis in words, the leak matrix, and the size sheet."""

import json

import pytest
import torch

import glassformer as gf
from glassformer import sizing as size
from glassformer.finding import Finding
from tests.studio.page import fits, needs_browser, panel, run_python

pytestmark = [needs_browser, pytest.mark.usefixtures("well_behaved")]


@pytest.fixture(scope="module")
def page(browser):
    return browser.open(view="doctor", model="induction", prompt="ABCABC")


def tiles(page):
    """The size sheet's numbers by name."""
    script = "all => all.map((one) => [one.querySelector('span').textContent, one.querySelector('b').textContent])"
    return dict(page.locator("[data-panel=size] .tile").evaluate_all(script))


def bars(page, number):
    """Name to value of one of the sheet's bar charts."""
    chart = page.locator("[data-panel=size] .chart").nth(number)
    return dict(chart.evaluate("node => node.data[0].y.map((name, i) => [name, node.data[0].x[i]])"))


def test_a_healthy_model_is_examined_live(page):
    page.get_by_role("button", name="Examine").click()
    page.locator("[data-panel=doctor][data-ready=induction]").wait_for(timeout=60_000)
    line = page.locator("[data-panel=doctor] .verdict-line").inner_text()
    rows = page.locator("[data-panel=doctor] .findings tbody tr")
    verdicts = rows.evaluate_all("all => all.map((one) => one.dataset.verdict)")
    assert "Healthy" in line
    assert f"{verdicts.count('pass')} passed, 0 failed" in line
    assert verdicts.count("pass") > 10
    ids = rows.locator(".finding-id").all_inner_texts()
    assert "causality" in rows.locator(".finding-family").all_inner_texts()
    assert {"causal_leak/future-token"} <= set(ids)
    # whatever numbers a row shows must agree with its verdict
    for verdict, text in zip(verdicts, rows.locator("td.num").all_inner_texts(), strict=True):
        assert ("≰" in text) == (verdict == "fail"), text
    page.locator("[data-panel=leak] canvas").first.wait_for()


def test_a_sick_model_gets_its_diagnosis_and_its_picture(page):
    leak = [[1.5, 0.25, 0.0], [0.5, 2.0, 0.125], [0.1, 0.2, 3.0]]
    seen = Finding.judge("causal_leak/future-token", 0.25, 1e-6, "nothing <b>later</b> may count", "mask the scores")
    answer = {
        "id": "causal_leak", "title": f"causal mask leak: {'later tokens ' * 20}", "location": "layer 1, heads 0 and 2",
        "remedy": "mask the scores", "evidence": [seen.to_dict()], "consequences": ["cache_mismatch/step"],
    }  # fmt: skip
    done = {"healthy": False, "notes": ["padding (not examined): it takes no mask"], "leak": leak, "text": ""}
    events = [("finding", seen.to_dict()), ("diagnosis", answer), ("done", done)]
    body = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events)
    page.route("**/api/doctor", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    page.get_by_role("button", name="Examine").click()
    card = page.locator(".diagnosis")
    card.wait_for()
    assert card.evaluate("card => card.scrollWidth <= card.clientWidth"), "a long title is cut off"
    response = card.inner_text()
    for part in (
        "causal mask leak",
        "causal_leak",
        "layer 1, heads 0 and 2",
        "mask the scores",
        "cache_mismatch/step",
    ):
        assert part in response
    shown = panel(page, "doctor").inner_text()
    assert "Not healthy" in shown
    assert shown.count("mask the scores") == 1
    assert "0.25 ≰" in shown
    assert "nothing <b>later</b> may count" in shown
    assert "padding (not examined): it takes no mask" in shown
    canvas = page.locator("[data-panel=leak] canvas").first
    canvas.focus()
    for key in ("ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    assert page.locator("[data-panel=leak] .readout").inner_text() == "output at 0, token 1 changed: 0.25 (future)"
    page.keyboard.press("ArrowRight")
    assert "exactly 0" in page.locator("[data-panel=leak] .readout").inner_text()
    page.unroute("**/api/doctor")


@pytest.mark.slow
def test_each_remedy_is_shown_once(page):
    def finding(name, remedy):
        return Finding.judge(name, 0.25, 1e-6, "it moved", remedy).to_dict()

    findings = [
        finding("causal_leak/future-token", "mask the scores"),
        finding("causal_leak/batch", "mask the scores"),
        finding("cache_mismatch/step", "keep what was computed"),
        finding("cache_mismatch/chunk", "keep what was computed"),
        finding("pad_leak/left", "hide the padding"),
    ]
    answer = {"title": "a", "location": "", "evidence": [], "consequences": []}
    diagnoses = [
        {"id": "causal_leak", "remedy": "mask the scores", **answer},
        {"id": "over_mask", "remedy": "mask the scores", **answer},
        {"id": "pad_leak", "remedy": "hide the padding", **answer},
    ]
    done = {"healthy": False, "notes": [], "leak": None, "text": ""}
    events = [*(("finding", one) for one in findings), *(("diagnosis", one) for one in diagnoses), ("done", done)]
    body = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events)
    page.route("**/api/doctor", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    for _ in range(2):  # an examination anew tells them anew
        page.get_by_role("button", name="Examine").click()
        page.locator(".diagnosis").nth(2).wait_for()
        page.locator("[data-panel=doctor] .verdict-line", has_text="Not healthy").wait_for()
        shown = panel(page, "doctor").inner_text()
        for remedy in ("mask the scores", "keep what was computed", "hide the padding"):
            assert shown.count(remedy) == 1, remedy
        assert "same as for causal_leak" in page.locator(".diagnosis").nth(1).inner_text()
        assert page.locator(".finding-remedy").all_inner_texts() == ["Fix: keep what was computed"]
    page.unroute("**/api/doctor")


def test_the_size_sheet_shows_the_librarys_numbers(page):
    page.locator("[data-panel=size] select").first.select_option("preset:gpt2")
    page.locator("""[data-panel=size][data-ready*='"preset":"gpt2"']""").wait_for()
    sheet = gf.size(gf.presets.gpt2())
    shown = tiles(page)
    assert shown["parameters"] == f"{sheet.parameters:,}" == "124,439,808"
    assert float(shown["FLOPs of one forward pass"].replace("e+", "e")) == pytest.approx(
        sheet.flops.total_forward, rel=5e-3
    )
    parts = {name: count for name, count in sheet.parts.items() if count}
    assert sorted(bars(page, 0).values()) == sorted(parts.values())
    assert sum(bars(page, 1).values()) == sheet.flops.total_forward
    note = page.locator("[data-panel=size] .status")
    assert not note.is_visible()
    page.get_by_label("Context", exact=True).fill("100000")
    page.locator("""[data-panel=size][data-ready*='"context":100000']""").wait_for()
    assert note.inner_text() == gf.size(gf.presets.gpt2(), context=100_000).note
    page.get_by_label("Batch", exact=True).fill("4")
    page.get_by_label("Context", exact=True).fill("256")
    page.get_by_label("Dtype").select_option("int8")
    page.locator("""[data-panel=size][data-ready*='"context":256']""").and_(
        page.locator("""[data-ready*=int8]""")
    ).wait_for()
    assert not note.is_visible()
    assert not any(name.startswith("training") for name in tiles(page))  # int8 cannot be trained
    result = run_python(page, "size")
    assert (result.batch, result.context, result.dtype) == (4, 256, "int8")


@pytest.mark.slow
def test_the_chinchilla_plot_moves_with_the_budget(page):
    page.locator("[data-panel=chinchilla][data-ready]").wait_for()
    page.get_by_label("Budget C, FLOPs").evaluate(
        "(node) => { node.value = Math.log(6e20); node.dispatchEvent(new Event('input')); }"
    )
    page.locator("[data-panel=chinchilla][data-ready='600000000000000000000']").wait_for()
    answer = size.chinchilla(flops=6e20)
    cells = page.locator("[data-panel=chinchilla] tbody tr").evaluate_all(
        "all => all.map((r) => [...r.cells].map((c) => c.textContent))"
    )
    for row, allocation in zip(cells, answer.allocations, strict=True):
        assert row[0] == allocation.method
        given = [float(text) for text in row[1:]]
        wanted = [allocation.parameters, allocation.tokens, allocation.ratio, allocation.loss]
        assert given == pytest.approx(wanted, rel=6e-3)
    charts = page.locator("[data-panel=chinchilla] .chart")
    dots = charts.first.evaluate("node => node.data.find((one) => one.name === 'this budget').y")
    assert list(dots) == pytest.approx([one.parameters for one in answer.allocations])
    # the straight lines go through the optimum of a budget that was not asked for
    x, y = charts.first.evaluate("node => [node.data[2].x, node.data[2].y]")
    logs = torch.tensor([list(x), list(y)], dtype=torch.float64).log()
    slope = (logs[1, 1] - logs[1, 0]) / (logs[0, 1] - logs[0, 0])
    between = torch.exp(logs[1, 0] + slope * (torch.tensor(6e20).double().log() - logs[0, 0]))
    assert float(between) == pytest.approx(answer.allocations[2].parameters, rel=1e-6)
    assert run_python(page, "chinchilla").value == 6e20


@pytest.mark.slow
def test_nothing_is_wider_than_the_window_at_either_width(page):
    for width, theme in ((400, "dark"), (1280, "light")):
        page.emulate_media(color_scheme=theme)
        page.set_viewport_size({"width": width, "height": 900})
        assert fits(page, width)
