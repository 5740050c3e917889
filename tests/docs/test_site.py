"""The documentation site: every public name, every page and every link has its place."""

import inspect
import re

import pytest

import glassformer as gf
from tests.docs.blocks import PAGES, ROOT


def test_the_api_documents_every_public_name():
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.md"))
    modules = {"claims", "config", "lens", "masks", "presets", "__version__"}
    for name in set(gf.__all__) - modules:
        assert re.search(rf"^\.\. auto\w+:: glassformer\.{name}$", text, re.MULTILINE), name


def test_the_first_page_of_the_api_lists_every_function():
    text = (ROOT / "docs" / "api" / "index.md").read_text(encoding="utf-8")
    functions = {name for name in gf.__all__ if inspect.isfunction(getattr(gf, name))}
    assert set(re.findall(r"^\| \{py:func\}`gf\.(\w+) <glassformer\.\1>`", text, re.MULTILINE)) == functions


def test_every_page_stands_in_the_contents():
    listed = set()
    for path in PAGES:
        for block in re.findall(r"```\{toctree\}\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL):
            names = [line for line in block.splitlines() if line and not line.startswith(":")]
            listed |= {(path.parent / f"{name}.md").resolve() for name in names}
    assert listed >= set(PAGES) - {ROOT / "docs" / "index.md"}


def test_the_readme_takes_thirty_seconds_and_fits_a_terminal():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    assert [line for line in lines if len(line) > 100 and not line.startswith(("|", "!"))] == []


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_requests_nothing_from_elsewhere(built_site):
    pages = list(built_site.rglob("*.html"))
    assert len(pages) > 100
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not re.search(r'<(?:script|img|link)[^>]+(?:src|href)="https?:', text), page
        missing = [name for name in re.findall(r'<img[^>]+src="([^":]+)"', text) if not (page.parent / name).exists()]
        assert missing == [], page
