"""Draw every picture of the documentation again: `make pictures`.

    python -m tests.docs.pictures [--gallery] [--studio]

Runs the commands of docs/gallery.md and reduces their pictures to 256 colours, then photographs the studio. Without
options it does both. It takes about ten minutes on two cores; the studio needs Chromium.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from io import BytesIO
from pathlib import Path

from tests.docs.blocks import ROOT

COLOURS = 256


def commands() -> list[list[str]]:
    """Return the commands of the gallery in their order, without the program."""
    text = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    return [shlex.split(line) for line in re.findall(r"^glass (.+)$", text, re.MULTILINE)]


def reduced(data: bytes) -> bytes:
    """Return a picture with at most 256 colours."""
    from PIL import Image

    out = BytesIO()
    Image.open(BytesIO(data)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return out.getvalue()


def draw_gallery() -> None:
    """Run the commands of the gallery in a folder of their own, and replace the pictures in docs/gallery."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "docs" / "gallery").mkdir(parents=True)
        (folder / "recipes").symlink_to(ROOT / "recipes")
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        for words in commands():
            subprocess.run([sys.executable, "-m", "glassformer", *words], cwd=folder, env=environment, check=True)
        for made in sorted((folder / "docs" / "gallery").iterdir()):
            (ROOT / "docs" / "gallery" / made.name).write_bytes(reduced(made.read_bytes()))


def photograph_studio() -> None:
    """Photograph every view of the studio into docs/images/studio."""
    folder = ROOT / "docs" / "images" / "studio"
    subprocess.run([sys.executable, "-m", "tests.studio.screenshots", "--out", str(folder)], cwd=ROOT, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gallery", action="store_true", help="Only the gallery.")
    parser.add_argument("--studio", action="store_true", help="Only the studio.")
    given = parser.parse_args()
    if given.gallery or not given.studio:
        draw_gallery()
    if given.studio or not given.gallery:
        photograph_studio()
    return 0


if __name__ == "__main__":
    sys.exit(main())
