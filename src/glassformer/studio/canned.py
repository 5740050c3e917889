"""Answers for the bundled models, computed at build time, so that the page is full before torch is imported.

    python -m glassformer.studio.canned          writes static/canned/

`index.json` lists the requests that have an answer (address, body, file) and the prompt of each model. Until torch is
there, a request that says the same as one of them is answered from its file; afterwards everything is computed.
"""

import json
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

from glassformer.files import write_atomically
from glassformer.studio.schema import Asked
from glassformer.studio.settings import Limits
from glassformer.studio.wire import MEDIA_TYPE, Packet, to_json

FOLDER = Path(__file__).parent / "static" / "canned"
PROMPTS = {"bard": "ROMEO:\nBut soft, what light", "induction": "H7KQ2M8XB7KQ2"}
"""What the page shows each bundled model with."""
SLIDERS = {"width": 64, "base": 10000.0, "length": 128, "offset": -8, "heads": 8, "pair": 4}
"""Where the sliders of the positions stand at first."""


class Canned:
    """The answers in a folder, found by what was asked."""

    def __init__(self, folder: Path = FOLDER):
        self.folder = folder

    @cached_property
    def index(self) -> dict[str, Any]:
        try:
            held = json.loads((self.folder / "index.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return held if isinstance(held, dict) else {}

    @cached_property
    def _files(self) -> dict[tuple[str, str, bool], str]:
        return {
            (row["path"], json.dumps(row["body"], sort_keys=True), row["type"] == MEDIA_TYPE): row["file"]
            for row in self.index.get("answers", ())
        }

    def find(self, path: str, asked: Asked, binary: bool) -> tuple[bytes, str] | None:
        """(bytes, media type) of the answer to this request; None when there is none."""
        name = self._files.get((path, _key(asked), binary))
        if name is None:
            return None
        try:
            return (self.folder / name).read_bytes(), MEDIA_TYPE if binary else "application/json"
        except OSError:
            return None


def _key(asked: Asked) -> str:
    return json.dumps(asked.model_dump(mode="json"), sort_keys=True)


def requests() -> list[tuple[str, Any, str]]:
    """(address, request, name of its file) of everything that is computed beforehand."""
    from glassformer.studio import schema
    from glassformer.studio.shelf import Shelf

    out: list[tuple[str, Any, str]] = []
    shelf = Shelf()
    for model, prompt in PROMPTS.items():
        ids = shelf.get(model).encode(prompt)
        about: dict[str, Any] = {"model": model, "ids": ids}
        asked: dict[str, Any] = {
            "tokens": schema.Tokens(model=model, text=prompt),
            "vocabulary": schema.AboutModel(model=model),
            "next": schema.Next(**about),
            "heads": schema.HeadScores(model=model),
            "patterns": schema.Patterns(**about),
            "lens": schema.Lens(**about),
            "attribution": schema.Attribution(**about, position=len(ids) - 1),
            "depth": schema.AboutText(**about),
            "tensor": schema.OneTensor(**about, site="block.0.attention.pattern", head=0),
        }
        out += [(path, request, f"{model}-{path}") for path, request in asked.items()]
    for kind in ("sinusoidal", "rotary", "alibi", "t5"):
        out.append(("positions", schema.Positions(kind=kind, **SLIDERS), f"positions-{kind}"))  # type: ignore[arg-type]
    return out


def answers() -> dict[str, tuple[dict[str, Any], bytes]]:
    """By file: the row of the index, and the bytes."""
    from glassformer.studio.api import playground
    from glassformer.studio.app import POSTED
    from glassformer.studio.shelf import Shelf

    shelf = Shelf(keep=Limits().models)
    out = {}
    for path, asked, name in requests():
        function = playground.next_logits if path == "next" else POSTED[path][1]
        result = function(shelf, asked)
        binary = isinstance(result, Packet)
        file = f"{name}.{'glass' if binary else 'json'}"
        row = {"path": path, "body": asked.model_dump(mode="json"), "file": file}
        row["type"] = MEDIA_TYPE if binary else "application/json"
        out[file] = (row, result.encode() if binary else to_json(result))
    return out


def write(folder: Path = FOLDER) -> int:
    """Compute and write everything; returns how many answers there are."""
    import torch

    torch.set_num_threads(1)  # the same sums in the same order, wherever it is built
    folder.mkdir(parents=True, exist_ok=True)
    made = answers()
    for old in folder.iterdir():
        if old.name not in made:
            old.unlink()
    for file, (_, data) in made.items():
        write_atomically(folder / file, data)
    index = {"prompts": PROMPTS, "answers": [row for row, _ in made.values()]}
    write_atomically(folder / "index.json", json.dumps(index, indent=1).encode() + b"\n")
    return len(made)


if __name__ == "__main__":
    print(f"{FOLDER.name}: {write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)} answers")
