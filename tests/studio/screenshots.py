"""Screenshots of every view of the studio, filled: both widths, both themes.

    python -m tests.studio.screenshots --out DIR [--views heads,stream] [--whole]

Trains a small model first, examines one whose causal mask was taken off, patches between two prompts, turns a claim by
its negative control; then each view is photographed at 1280 and 400 pixels, light and dark, as VIEW-WIDTH-THEME.png.
The pictures are reduced to a palette, so that 36 of them stay small. `--whole` keeps a view at its full height, to be
looked at from top to bottom; without it, a long one is cut.

docs/images/studio is made by this, without --whole.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import glassformer as gf
from glassformer.studio.models import LoadedModel, ModelStore
from tests.studio.page import VIEWS, opened, panel, served

WINDOW = {1280: 900, 400: 860}
TALLEST = {False: {1280: 1360, 400: 1500}, True: {1280: 4200, 400: 9000}}
COLOURS = 256
MOST_BYTES = 150_000
STEPS = 400
FIELDS = {"Layers L": 2, "Width D": 64, "Heads H": 4, "Context length": 64, "Batch": 8, "Steps": STEPS}


def playground(site: Any, run: str) -> Any:
    page = site.open(view="playground")
    page.wait_for_selector("[data-panel=next][data-ready]")
    page.get_by_label("Temperature", exact=True).evaluate(
        "(one) => { one.value = 0.8; one.dispatchEvent(new Event('input')); }"
    )
    page.get_by_label("New tokens").fill("160")
    for cached in (False, True):
        page.get_by_label("KV cache").set_checked(cached)
        if cached:
            page.get_by_role("button", name="Clear").click()
        page.get_by_role("button", name="Run", exact=True).click()
        page.locator(".written .new").nth(150).wait_for(timeout=60_000)
        page.wait_for_selector("button:enabled:text-is('Run')")
    page.get_by_role("button", name="Search", exact=True).click()
    page.wait_for_selector(".tree svg")
    return page


def anatomy(site: Any, run: str) -> Any:
    page = site.open(view="anatomy", part="blocks.2.attention", layer=2, site="blocks.2.attention.scores", head=3)
    page.wait_for_selector("[data-panel=part][data-site='blocks.2.attention.scores']")
    canvas = panel(page, "part").locator("canvas[tabindex]")
    canvas.focus()
    for key in ["ArrowDown"] * 13 + ["ArrowRight"] * 7 + ["Enter"]:
        page.keyboard.press(key)
    panel(page, "cell").locator("table").wait_for()
    return page


def heads(site: Any, run: str) -> Any:
    page = site.open(view="heads", model="induction", prompt="H7KQ2M8XB7KQ2", layer=1, head=0, token=12)
    page.wait_for_selector("[data-panel=grid][data-drawn]")
    for head in (1, 0):
        page.locator(".grid-wrap canvas").focus()
        page.keyboard.press("ArrowRight" if head else "ArrowLeft")
        page.get_by_role("button", name=f"Ablate head 1.{head}").click()
    page.get_by_role("heading", name="Without 1.1, 1.0").wait_for()
    page.wait_for_selector("[data-panel=ablate][data-kl]")
    panel(page, "scores").locator("tbody tr").first.wait_for()
    return page


def stream(site: Any, run: str) -> Any:
    page = site.open(view="stream")
    page.wait_for_selector("[data-panel=rank][data-ready]")
    page.wait_for_selector("[data-panel=attribution] .js-plotly-plot")
    page.get_by_role("button", name="Patch", exact=True).click()
    page.wait_for_selector("[data-panel=patch][data-ready]")
    return page


def positions(site: Any, run: str) -> Any:
    page = site.open(view="positions")
    for kind in ("sinusoidal", "rotary", "alibi", "t5", "learned"):
        page.wait_for_selector(f"[data-panel=positions-{kind}][data-ready]")
    return page


def theory(site: Any, run: str) -> Any:
    page = site.open(view="theory", claim="softmax-row-stochastic")
    page.locator(".claim-figure svg").wait_for()
    page.get_by_role("button", name="Run", exact=True).click()
    page.wait_for_selector("[data-panel=claim][data-ready$=whole]")
    page.get_by_label("negative control").check()
    page.wait_for_selector("[data-panel=claim][data-ready$=broken]")
    return page


def course(site: Any, run: str) -> Any:
    page = site.open(view="course", item="rope-score")
    page.wait_for_selector("[data-panel=problem][data-ready=rope-score]")
    page.get_by_label("Answer", exact=True).fill("3")
    page.get_by_role("button", name="Check").click()
    page.wait_for_selector(".course-verdict [data-result]")
    page.get_by_role("button", name="Hint").click()
    page.get_by_text("Solution", exact=True).click()
    page.wait_for_selector(".erratum")
    return page


def train(site: Any, run: str) -> Any:
    page = site.open(view="train", run=run)
    page.wait_for_selector(f"[data-panel=loss][data-points='{STEPS}']")
    page.wait_for_selector("[data-panel=head-scores] .js-plotly-plot")
    return page


def doctor(site: Any, run: str) -> Any:
    page = site.open(view="doctor", model="leaky", prompt="To be")
    page.wait_for_selector("[data-panel=chinchilla][data-ready]")
    page.get_by_role("button", name="Examine").click()
    page.wait_for_selector("[data-panel=doctor][data-ready=leaky]", timeout=300_000)
    return page


SCENES: dict[str, Callable[[Any, str], Any]] = {
    "playground": playground, "anatomy": anatomy, "heads": heads, "stream": stream, "positions": positions,
    "theory": theory, "course": course, "train": train, "doctor": doctor,
}  # fmt: skip


def trained(site: Any) -> str:
    """The id of a run on Shakespeare that has ended."""
    page = site.open(view="train")
    page.locator("button:enabled", has_text="Start training").wait_for(timeout=60_000)
    for label, value in FIELDS.items():
        page.locator("glass-train").get_by_label(label, exact=True).fill(str(value))
    page.get_by_role("button", name="Start training").click()
    page.locator("tr.chosen .run-state[data-state=finished]").wait_for(timeout=600_000)
    run = page.locator("tr.chosen").get_attribute("data-run")
    site.close_all()
    return str(run)


def photograph(page: Any, view: str, out: Path, whole: bool) -> None:
    for width in (1280, 400):
        for theme in ("light", "dark"):
            page.emulate_media(color_scheme=theme)
            page.set_viewport_size({"width": width, "height": WINDOW[width]})
            page.wait_for_timeout(500)
            tall = "document.querySelector('header.top').offsetHeight + document.querySelector('main').scrollHeight"
            tall = tall if width == 1280 else "document.documentElement.scrollHeight"
            height = min(TALLEST[whole][width], max(WINDOW[width], int(page.evaluate(tall)) + 4))
            page.set_viewport_size({"width": width, "height": height})
            page.wait_for_timeout(500)
            page.mouse.move(0, 0)
            page.evaluate("document.querySelector('main').scrollTo(0, 0), scrollTo(0, 0)")
            target = out / f"{view}-{width}-{theme}.png"
            target.write_bytes(reduced(page.screenshot()))
            print(f"{target.name}: {target.stat().st_size:,} bytes")


def reduced(data: bytes) -> bytes:
    """The picture with as many colours as keep it under its limit."""
    from PIL import Image

    picture = Image.open(BytesIO(data)).convert("RGB")
    colours = COLOURS
    while True:
        out = BytesIO()
        picture.quantize(colours, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
        if out.tell() <= MOST_BYTES or colours <= 16:
            return out.getvalue()
        colours = colours * 3 // 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--views", default=",".join(VIEWS))
    parser.add_argument("--whole", action="store_true")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    load_copy = ModelStore.load_copy

    def unmasked(models: ModelStore, name: str) -> LoadedModel:
        """The model `leaky` is examined without its causal mask: a folder alone cannot be wrong in this way."""
        loaded = load_copy(models, name)
        if name == "leaky":
            loaded.model.decoder.causal = False
        return loaded

    ModelStore.load_copy = unmasked  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        os.environ["GLASSFORMER_COURSE"] = str(root / "course.json")
        gf.save(gf.load("bard"), root / "leaky", "glass", tokenizer=gf.load_tokenizer("bard"))
        with served(root / "studio", models=(root / "leaky",)) as address, opened(address) as site:
            views = given.views.split(",")
            run = trained(site) if "train" in views else ""
            for view in views:
                photograph(SCENES[view](site, run), view, given.out, given.whole)
                problems = site.close_all()
                if problems:
                    print(f"{view}: {problems}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
