"""The pages of the site in Chromium: nothing sticks out, nothing is missing, everything can be read."""

from pathlib import Path

import pytest

from tests.docs import site_pages
from tests.studio.page import needs_browser

BROKEN = """<!doctype html><title>t</title><body><article>
<p style="width: 2000px">wide</p><img src="none.png"><script>console.error("oops")</script>
<script src="https://example.com/x.js"></script>
<p style="color: #999; background: #fff">pale</p><p style="color: #333; background: #fff">dark</p></article>"""


@needs_browser
@pytest.mark.slow
def test_every_kind_of_problem_is_found(tmp_path):
    (tmp_path / "broken.html").write_text(BROKEN)
    (tmp_path / "whole.html").write_text("<!doctype html><title>t</title><article><p>words</p></article>")
    assert site_pages.pages(tmp_path) == ["broken.html", "whole.html"]
    assert list(site_pages.problems(tmp_path, ["whole.html"])) == []
    found = "\n".join(site_pages.problems(tmp_path, ["broken.html"], tmp_path))
    for words in ("wide, the window 390", "none.png is missing", "oops", "a request to https://example.com/x.js",
                  "contrast 2.85 of p.: pale"):  # fmt: skip
        assert words in found, words
    assert ": dark" not in found
    assert {Path(f"broken-{width}-{theme}.png") for width in (1280, 390) for theme in ("light", "dark")} == {
        path.relative_to(tmp_path) for path in tmp_path.glob("*.png")
    }


@needs_browser
@pytest.mark.slow
def test_every_page_of_the_site(built_site):
    names = site_pages.pages(built_site)
    assert len(names) > 100
    assert list(site_pages.problems(built_site, names)) == []
