"""Open every page of the built site in Chromium, at two widths and in both themes.

    python -m tests.docs.site_pages SITE [--out DIR] [--pages index,doctor]

`SITE` is the folder that `make site` writes, docs/_build. The command prints problems: text that sticks out of the
window, pictures that do not load, requests to other places, errors in the console, text with too little contrast.
With `--out`, the pages are also photographed, as PAGE-WIDTH-THEME.png.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.studio.page import CHROMIUM, FLAGS

WIDTHS = (1280, 390)
THEMES = ("light", "dark")
LOOK = """
() => {
  const problems = [];
  if (document.documentElement.scrollWidth > window.innerWidth)
    problems.push(`the page is ${document.documentElement.scrollWidth} wide, the window ${window.innerWidth}`);
  for (const image of document.images)
    if (!image.complete || !image.naturalWidth) problems.push(`the picture ${image.getAttribute("src")} is missing`);
  const numbers = (colour) => (colour.match(/[\\d.]+/g) ?? []).map(Number);
  const linear = (part) => (part /= 255) <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const mixed = (top, below) => {
    const alpha = top[3] ?? 1;
    return [0, 1, 2].map((n) => alpha * top[n] + (1 - alpha) * below[n]);
  };
  const behind = (element) => {
    const layers = [];
    for (let one = element; one; one = one.parentElement) layers.push(numbers(getComputedStyle(one).backgroundColor));
    return layers.reverse().reduce((below, top) => top.length ? mixed(top, below) : below, [255, 255, 255]);
  };
  const seen = new Set();
  for (const element of document.querySelectorAll("article *, .sidebar-drawer a, .toc-drawer a")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !element.checkVisibility?.({ visibilityProperty: true, opacityProperty: true })) continue;
    const style = getComputedStyle(element), below = behind(element);
    const key = `${style.color} ${below} ${style.fontSize}`;
    if (seen.has(key)) continue;
    seen.add(key);
    const [low, high] = [luminance(mixed(numbers(style.color), below)), luminance(below)].sort((a, b) => a - b);
    const ratio = (high + 0.05) / (low + 0.05), size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.6 && Number(style.fontWeight) >= 700);
    if (ratio < (large ? 3 : 4.5))
      problems.push(`contrast ${ratio.toFixed(2)} of ${element.localName}.${element.className}: `
        + element.textContent.trim().slice(0, 40));
  }
  return problems;
}
"""
THEME = "(theme) => { document.body.dataset.theme = theme; localStorage.setItem('theme', theme); }"


def settle(page: Any, width: int, theme: str) -> None:
    """Show a page at a width and in a theme."""
    page.set_viewport_size({"width": width, "height": 900})
    page.evaluate(THEME, theme)
    page.wait_for_timeout(30)


def look(page: Any) -> Iterator[str]:
    """Yield what is wrong with an open page, each with the width and the theme."""
    for width in WIDTHS:
        for theme in THEMES:
            settle(page, width, theme)
            for problem in page.evaluate(LOOK):
                yield f"{width} {theme}: {problem}"


def problems(site: Path, names: list[str], out: Path | None = None) -> Iterator[str]:
    """Open pages of a site and yield what is wrong with them; photograph them into `out`."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        page = browser.new_page(reduced_motion="reduce")
        found: list[str] = []
        page.on("console", lambda m: found.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: found.append(str(error)))
        own = (site.resolve().as_uri(), "data:", "blob:")
        page.on("request", lambda r: None if r.url.startswith(own) else found.append(f"a request to {r.url}"))
        for name in names:
            page.goto((site / name).resolve().as_uri())
            found += look(page)
            yield from (f"{name}: {problem}" for problem in dict.fromkeys(found))
            found.clear()
            for width in WIDTHS if out else ():
                for theme in THEMES:
                    settle(page, width, theme)
                    page.screenshot(path=str(out / f"{Path(name).stem}-{width}-{theme}.png"))
        browser.close()


def pages(site: Path) -> list[str]:
    """Return every page of a site."""
    return sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--pages", default="")
    given = parser.parse_args()
    names = [f"{name}.html" for name in given.pages.split(",") if name] or pages(given.site)
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
    found = 0
    for problem in problems(given.site, names, given.out):
        found += 1
        print(problem, flush=True)
    print(f"{len(names)} pages, {found} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
