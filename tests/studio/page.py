"""The studio's page in Chromium: a server on a free port, a browser, and pages that may not misbehave."""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

import glassformer

STATIC = Path(glassformer.__file__).parent / "studio" / "static"
VIEWS = tuple(re.findall(r'^  \["(\w+)", "', (STATIC / "js" / "shell.js").read_text(), re.MULTILINE))
"""The views of the page, by the list that the page itself uses."""


def find_chromium() -> Path | None:
    """The browser named by $CHROMIUM, one of the system's, or the one that playwright has installed."""
    if named := os.environ.get("CHROMIUM"):
        return Path(named) if Path(named).exists() else None
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return Path(found)
    caches = (os.environ.get("PLAYWRIGHT_BROWSERS_PATH"), "~/.cache/ms-playwright", "~/Library/Caches/ms-playwright")
    inside = ("chromium-*/chrome-linux*/chrome", "chromium-*/chrome-mac*/*.app/Contents/MacOS/*")
    kept = [Path(cache).expanduser() for cache in caches if cache]
    return next((file for cache in kept for pattern in inside for file in sorted(cache.glob(pattern))[::-1]), None)


FOUND = find_chromium()
CHROMIUM = FOUND or Path("/usr/bin/chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
missing = [
    name for name in ("playwright", "starlette", "uvicorn", "pydantic") if importlib.util.find_spec(name) is None
]
INSTALL = ".venv/bin/python -m playwright install --with-deps chromium"
REASON = f"{', '.join(missing)} missing: run make test" if missing else f"no Chromium was found: run {INSTALL}"
needs_browser = pytest.mark.skipif(FOUND is None or bool(missing), reason=REASON)
if not missing:
    from playwright.sync_api import expect

    expect.set_options(timeout=60_000)  # a loaded machine is no fault of the page
else:
    expect = None
ROMEO = "ROMEO:\nBut soft, what light"
REPEAT = "H7KQ2M8XB7KQ2"


class Opened:
    """A browser and the address of the studio; every page made here is watched."""

    def __init__(self, browser: Any, address: str):
        self.browser, self.address = browser, address
        self.folders: dict[str, Path] = {}
        """Models served next to the bundled ones, by name."""
        self.problems: list[str] = []

    def open(self, width: int = 1280, height: int = 900, theme: str = "light", **selection: Any) -> Any:
        """A page at a selection: console errors, exceptions and requests to elsewhere are kept in `problems`."""
        page = self.browser.new_page(viewport={"width": width, "height": height}, color_scheme=theme)
        page.set_default_timeout(60_000)
        page.on("console", lambda m: self.problems.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        own = (self.address, "data:", "blob:")
        page.on("request", lambda r: None if r.url.startswith(own) else self.problems.append(f"outside: {r.url}"))
        page.goto(f"{self.address}/#{urlencode(selection)}")
        return page

    def close_all(self) -> list[str]:
        """What the pages did wrong since the last time."""
        for context in self.browser.contexts:
            context.close()
        found, self.problems = self.problems, []
        return found


@contextlib.contextmanager
def served(folder: Path, **given: Any) -> Iterator[str]:
    """The studio on a free port of this machine, in a thread."""
    import uvicorn

    import glassformer as gf
    from glassformer.studio.app import create_app
    from glassformer.studio.settings import Settings

    gf.load("bard")  # what torch imports late is imported here, so that no test waits for it
    app = create_app(Settings(folder=folder, warm=False, **given))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", ws="none"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        for _ in range(400):
            if server.started:
                break
            time.sleep(0.025)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)


@contextlib.contextmanager
def opened(address: str) -> Iterator[Opened]:
    """A browser for the studio at an address."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield Opened(browser, address)
        browser.close()


def slide(page: Any, label: str, value: Any) -> None:
    """Move a slider as a hand would."""
    page.get_by_label(label, exact=True).evaluate(
        "(one, v) => { one.value = v; one.dispatchEvent(new Event('input')); }", str(value)
    )


def fits(page: Any, width: int) -> bool:
    """Whether nothing sticks out of the window, once the charts have followed it."""
    wide = "document.documentElement.scrollWidth"
    return any(page.evaluate(wide) <= width or page.wait_for_timeout(100) for _ in range(30))


def selection(page: Any) -> dict[str, str]:
    """What the page's address says is selected."""
    return dict(page.evaluate("[...new URLSearchParams(location.hash.slice(1))]"))


def panel(page: Any, name: str) -> Any:
    return page.locator(f'[data-panel="{name}"]')


def run_python(page: Any, name: str) -> Any:
    """`result` of the lines that "Copy as Python" of a panel gives."""
    panel(page, name).get_by_role("button", name="Copy as Python").click()
    lines = page.locator("dialog pre").inner_text()
    page.get_by_role("button", name="Close").click()
    space: dict[str, Any] = {}
    exec(lines, space)
    return space["result"]


def module(page: Any, name: str, body: str, *values: Any) -> Any:
    """Run `body`, a function's body, in the page with a module as `m` and the values as `v`."""
    script = f"async (v) => {{ const m = await import('/static/js/{name}.js'); {body} }}"
    return page.evaluate(script, json.loads(json.dumps(list(values))))
