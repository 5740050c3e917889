"""The pictures of the gallery are those that its commands draw now."""

import contextlib
import io
from pathlib import Path

import pytest
from PIL import Image, ImageChops, ImageStat

from glassformer.cli import main
from tests.docs import pictures
from tests.docs.blocks import ROOT

SMALL = (160, 160)
DIFFERENT = 6
"""Mean difference of the grey values of reduced pictures, of 255, above which a picture is another one."""


def difference(a, b):
    """Return how much two pictures differ, reduced to the same small size."""
    with Image.open(a) as one, Image.open(b) as other:
        pair = [picture.convert("L").resize(SMALL) for picture in (one, other)]
    return ImageStat.Stat(ImageChops.difference(*pair)).mean[0]


def test_the_commands_are_found_and_every_picture_has_one():
    drawn = {Path(words[words.index("--out") + 1]).name for words in pictures.commands() if "--out" in words}
    assert drawn == {path.name for path in (ROOT / "docs" / "gallery").iterdir()}


def test_a_picture_with_other_contents_is_another_one(tmp_path):
    gallery = ROOT / "docs" / "gallery"
    assert difference(gallery / "attention.png", gallery / "attention.png") == 0
    assert difference(gallery / "head.png", gallery / "induction.png") > DIFFERENT
    reduced = pictures.reduced((gallery / "head.png").read_bytes())
    (tmp_path / "again.png").write_bytes(reduced)
    assert difference(gallery / "head.png", tmp_path / "again.png") < 0.5


LOOKS = [words for words in pictures.commands() if words[0] == "look" and words[1] != "training"]


@pytest.mark.slow
@pytest.mark.parametrize("words", LOOKS, ids=lambda words: Path(words[-1]).stem)
def test_a_picture_of_the_gallery_is_up_to_date(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs" / "gallery").mkdir(parents=True)
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(words) == 0
    made = Path(words[words.index("--out") + 1])
    assert difference(made, ROOT / made) < DIFFERENT
