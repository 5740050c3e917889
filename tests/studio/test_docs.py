"""docs/studio.md: its pictures are there and small, its options are those of `glass serve`, its example runs."""

import inspect
import re
from pathlib import Path

import pytest

import glassformer as gf
from glassformer.cli.serve import serve
from tests.studio.page import VIEWS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "studio.md").read_text()


def test_every_view_is_shown_at_both_widths_in_both_themes_and_the_pictures_are_small():
    named = set(re.findall(r"images/studio/([\w-]+)\.png", TEXT))
    assert named == {
        f"{view}-{width}-{theme}" for view in VIEWS for width in (1280, 400) for theme in ("light", "dark")
    }
    sizes = [(ROOT / "docs" / "images" / "studio" / f"{name}.png").stat().st_size for name in named]
    assert max(sizes) <= 150_000
    assert sum(sizes) <= 4_000_000
    for path in re.findall(r"\((docs/images/[^)]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / path).exists()


def test_every_option_of_glass_serve_is_documented():
    rows = dict(re.findall(r"^\| `--([\w-]+)([^`]*)` \|", TEXT, re.MULTILINE))
    assert {name.removeprefix("no-") for name in rows} == set(inspect.signature(serve).parameters)
    for name in ("port", "host"):
        assert rows[name].strip() == str(inspect.signature(serve).parameters[name].default)


def test_the_openai_example_runs_as_it_is_printed(server, capsys):
    pytest.importorskip("openai")
    (example,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    server.wait_for_torch()
    exec(example.replace("http://127.0.0.1:8000", server.address), {})
    names, _, rest = capsys.readouterr().out.partition("\n")
    assert "bard" in names
    tokenizer = gf.load_tokenizer("bard")
    wanted = tokenizer.decode(
        gf.generate(gf.load("bard", dtype="float32"), [tokenizer.encode("ROMEO:").ids], 40).new[0]
    )
    assert rest == f"{wanted}\n{wanted}"  # whole, then streamed
