"""The view "Train": a run is started, followed, survives a reload, pauses and goes on; every point is drawn."""

import itertools
import json
import os
import signal
import time

import pytest

import glassformer as gf
from tests.studio.page import fits, module, needs_browser, panel, selection

pytestmark = [needs_browser, pytest.mark.usefixtures("well_behaved")]
TEXT = (
    "ROMEO:\nBut soft, what light? the cat sat on the mat and the dog on the log <b>and</b> then they ran away. " * 40
)
TINY = {"Layers L": 1, "Width D": 16, "Heads H": 2, "Context length": 32, "Batch": 2}


@pytest.fixture(scope="module")
def folder(page_folder):
    return page_folder


@pytest.fixture(scope="module")
def page(browser):
    return browser.open(view="train")


def control(page, label):
    return page.locator("glass-train").get_by_label(label, exact=True)


def start(page, steps, **more):
    """Upload the text, set the fields, start; gives the id of the run."""
    page.locator("button:enabled", has_text="Start training").wait_for()
    page.get_by_label("Or upload a text").set_input_files(
        {"name": "<b>cats</b>.txt", "mimeType": "text/plain", "buffer": TEXT.encode()}
    )
    page.get_by_text("characters, selected.").wait_for()
    for label, value in {**TINY, "Steps": steps, **more}.items():
        control(page, label).fill(str(value))
    before = selection(page).get("run", "none")
    page.get_by_role("button", name="Start training").click()
    page.locator(f"tr.chosen:not([data-run={before}])").wait_for()
    return selection(page)["run"]


def logged(folder, run):
    lines = (folder / "runs" / run / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def state(page, run, wanted):
    page.locator(f"tr[data-run={run}] .run-state[data-state={wanted}]").wait_for(timeout=60_000)


def curve(page, name, number=0):
    return page.locator(f"[data-panel={name}] .chart").evaluate(
        f"node => [[...node.data[{number}].x], [...node.data[{number}].y]]"
    )


@pytest.mark.slow
def test_a_run_is_started_followed_to_its_end_and_still_there_after_a_reload(page, folder):
    run = start(page, 30)
    state(page, run, "finished")
    events = logged(folder, run)
    steps = [event for event in events if event["event"] == "step"]
    assert len(steps) == 30
    for _ in range(2):  # as it came, and again after a reload
        page.locator("[data-panel=loss][data-points='30']").wait_for()
        x, y = curve(page, "loss")
        assert x == [event["step"] for event in steps]
        assert y == [event["loss"] for event in steps]
        assert curve(page, "gradient")[1] == [event["gradient_norm"] for event in steps]
        checks = [event for event in events if event["event"] == "validation"]
        assert curve(page, "loss", 1)[1] == [event["loss"] for event in checks]
        lines = page.locator("[data-panel=loss] .chart").evaluate(
            "node => node.layout.annotations.map((one) => one.text)"
        )
        began = events[0]
        wanted = {"uniform": began["uniform"], **began["baselines"]}
        assert sorted(lines) == sorted(f"{name} {value:.2f}" for name, value in wanted.items())
        page.reload()
    page.locator(f"tr[data-run={run}]", has_text="<b>cats</b>.txt").wait_for()
    page.locator(f"tr[data-run={run}]").get_by_role("button", name="Open in playground").click()
    page.locator("glass-playground:not([hidden])").wait_for()
    assert page.input_value("#model") == run
    assert gf.load(folder / "runs" / run / "out" / "best").config.d_model == 16
    page.go_back()
    page.locator("glass-train:not([hidden])").wait_for()


@pytest.mark.slow
def test_limits_are_the_dataclasses_and_a_refusal_is_a_sentence(page):
    control(page, "Steps").fill("0")
    page.get_by_role("button", name="Start training").click()
    assert not control(page, "Steps").evaluate("node => node.validity.valid")
    control(page, "Steps").fill("30")
    page.locator("summary", has_text="All fields").click()
    assert control(page, "Floor").get_attribute("max") == "1"
    page.locator("summary", has_text="All fields").click()


def test_every_point_is_kept_and_a_long_curve_keeps_its_peaks(page):
    kept, xs, ys = module(
        page, "train-live",
        """const run = new m.LiveRun();
        run.take("start", {step: 0, steps: 5000, tokens_per_step: 10, parameters: 1, device: "cpu", uniform: 4});
        for (let step = 1; step <= 5000; step++)
          run.take("step", {step, loss: step === 3333 ? 99 : 1 / step, gradient_norm: 1, steps_per_second: 2, lr: 1});
        const {x, y} = run.curves.loss;
        run.take("start", {step: 4000, steps: 5000, tokens_per_step: 10, parameters: 1, device: "cpu", uniform: 4});
        run.take("step", {step: 4001, loss: 7, gradient_norm: 1, steps_per_second: 2, lr: 1});
        const kept = [x.length, y.at(-1)];
        run.clear();
        const long = Array.from({length: 5000}, (_, i) => i);
        const [xs, ys] = m.thin(long, long.map((i) => (i === 3333 ? 99 : 0)));
        return [kept, xs, ys];""",
    )  # fmt: skip
    assert kept == [4001, 7]  # 5000 points, then a resumed run that does the last thousand again
    assert len(xs) <= 2000
    assert xs == sorted(xs)
    assert ys[xs.index(3333)] == 99


@pytest.mark.sample(1)
@pytest.mark.parametrize("width", [1200, 360])
def test_the_names_of_the_lines_are_next_to_the_plot_without_overlap(page, width):
    """Where the curve lies on a line, as a model that has learnt bigrams does, its name would be unreadable in it."""
    plot, labels, edge = module(
        page, "train-live",
        """const box = (node) => node.getBoundingClientRect().toJSON();
        const run = new m.LiveRun();
        const frame = document.createElement("div");
        frame.style = `position: fixed; inset: 0 auto auto 0; width: ${v[0]}px`;
        frame.append(run.loss.root);
        document.body.append(frame);
        const baselines = {unigram: 3.35, bigram: 2.49, "3-gram": 2.48, "5-gram": 2.47};
        const start = {step: 0, steps: 50, tokens_per_step: 10, parameters: 1, device: "cpu", uniform: 4.17, baselines};
        run.take("start", start);
        for (let step = 1; step <= 50; step++)
          run.take("step", {step, loss: 2.4 + 1.7 / step, gradient_norm: 1, steps_per_second: 2, lr: 1});
        run.drawLoss();
        while (frame.querySelectorAll(".annotation-text").length < 5) await new Promise((r) => setTimeout(r, 50));
        const found = [box(frame.querySelector(".nsewdrag")), [...frame.querySelectorAll(".annotation-text")].map(box),
          box(frame.querySelector(".main-svg")).right];
        run.clear();
        frame.remove();
        return found;""",
        width,
    )  # fmt: skip
    assert len(labels) == 5
    assert all(one["left"] >= plot["right"] for one in labels)
    assert all(one["right"] <= edge for one in labels)
    labels.sort(key=lambda one: one["top"])
    assert all(above["bottom"] <= below["top"] + 1 for above, below in itertools.pairwise(labels))
    assert all(plot["top"] - 20 < (one["top"] + one["bottom"]) / 2 for one in labels)


def test_a_run_that_was_interrupted_can_be_resumed_and_its_memory_is_known(page, folder):
    """A run whose process has died, as the folder shows it; what Resume asks the server is kept from it here."""
    run = folder / "runs" / "run-dead"
    run.mkdir(parents=True)
    facts = {"created": time.time(), "wanted": "running", "corpus": "embedded", "preset": "nano", "steps": 9}
    (run / "studio.json").write_text(json.dumps({**facts, "peak_bytes": 300 * 2**20, "predicted_bytes": 2**20}))
    events = [
        {"event": "start", "step": 0, "steps": 9, "tokens_per_step": 8, "parameters": 5, "device": "cpu", "uniform": 4},
        {"event": "step", "step": 1, "loss": 3.5, "gradient_norm": 1.0, "steps_per_second": 5.0, "lr": 0.1},
    ]
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    page.goto(page.url.split("#")[0] + "#view=train&run=run-dead")
    state(page, "run-dead", "failed")
    shown = panel(page, "loss")
    shown.locator(".run-state[data-state=failed]").wait_for()
    page.locator("[data-panel=memory] .chart").wait_for()
    bars = page.locator("[data-panel=memory] .chart").evaluate(
        "node => node.data[0].x.map((v, i) => [node.data[0].y[i], v])"
    )
    assert dict(bars) == {"predicted": 1, "peak": 300}
    asked = []
    page.route("**/api/train/run-dead/resume", lambda r: (asked.append(r.request.method), r.fulfill(json={})))
    shown.get_by_role("button", name="Resume").click()
    page.locator("tr[data-run=run-dead]").get_by_role("button", name="Resume").click()
    page.wait_for_timeout(200)
    assert asked == ["POST", "POST"]
    page.unroute("**/api/train/run-dead/resume")


@pytest.mark.slow
def test_a_killed_run_goes_on_when_resumed(page, folder):
    run = start(page, 400)
    page.locator("[data-panel=loss][data-points]").wait_for(timeout=60_000)
    os.kill(json.loads((folder / "runs" / run / "studio.json").read_text())["pid"], signal.SIGKILL)
    state(page, run, "failed")
    panel(page, "loss").get_by_role("button", name="Resume").click()
    state(page, run, "finished")
    page.locator("[data-panel=loss][data-points='400']").wait_for()


@pytest.mark.slow
def test_nothing_is_wider_than_the_window_at_either_width(page):
    for width, theme in ((400, "dark"), (1280, "light")):
        page.emulate_media(color_scheme=theme)
        page.set_viewport_size({"width": width, "height": 900})
        assert fits(page, width)


@pytest.mark.slow
def test_a_run_pauses_resumes_and_stops(page, folder):
    run = start(page, 100_000)
    page.locator("[data-panel=loss][data-points]").wait_for(timeout=60_000)
    row = page.locator(f"tr[data-run={run}]")
    row.get_by_role("button", name="Pause").click()
    state(page, run, "paused")
    before = [0, *(event["step"] for event in logged(folder, run) if event["event"] == "step")]
    row.get_by_role("button", name="Resume").click()
    state(page, run, "running")
    for _ in range(600):
        steps = [event["step"] for event in logged(folder, run) if event["event"] == "step"]
        if steps and steps[-1] > before[-1] + 200:
            break
        time.sleep(0.1)
    row.get_by_role("button", name="Stop").click()
    state(page, run, "stopped")
    last = max(event["step"] for event in logged(folder, run) if event["event"] == "step")
    page.locator(f"[data-panel=loss][data-points='{last}']").wait_for()
    x, _ = curve(page, "loss")
    assert x == sorted(set(x))
    assert panel(page, "loss").locator("progress").evaluate("node => node.value") == pytest.approx(
        last / 100_000, rel=0.01
    )
