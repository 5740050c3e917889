"""Responses for the bundled models that are computed at build time, so that the page is full before torch is imported.

    python -m glassformer.studio.recorded          writes static/recorded/

`index.json` lists the recorded requests (path, body, file) and the prompt of each model. Until torch is imported, a
request that equals one of them is served from its file; afterwards every response is computed.
"""

import json
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

from glassformer.files import write_atomically
from glassformer.studio.encoding import MEDIA_TYPE, TensorResponse, to_json
from glassformer.studio.schema import ApiRequest
from glassformer.studio.settings import Limits

FOLDER = Path(__file__).parent / "static" / "recorded"
PROMPTS = {"bard": "ROMEO:\nBut soft, what light", "induction": "H7KQ2M8XB7KQ2"}
"""The prompt that the page shows first for each bundled model."""
POSITION_DEFAULTS = {"width": 64, "base": 10000.0, "length": 128, "offset": -8, "heads": 8, "pair": 4}
"""Initial values of the sliders in the positions view."""


class RecordedResponses:
    """The recorded responses of a folder, found by request."""

    def __init__(self, folder: Path = FOLDER):
        self.folder = folder

    @cached_property
    def index(self) -> dict[str, Any]:
        try:
            index = json.loads((self.folder / "index.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return index if isinstance(index, dict) else {}

    @cached_property
    def _files(self) -> dict[tuple[str, str, bool], str]:
        return {
            (row["path"], json.dumps(row["body"], sort_keys=True), row["type"] == MEDIA_TYPE): row["file"]
            for row in self.index.get("responses", ())
        }

    def find(self, path: str, request: ApiRequest, binary: bool) -> tuple[bytes, str] | None:
        """Return (bytes, media type) of the response to this request; None if it was not recorded."""
        name = self._files.get((path, json.dumps(request.model_dump(mode="json"), sort_keys=True), binary))
        if name is None:
            return None
        try:
            return (self.folder / name).read_bytes(), MEDIA_TYPE if binary else "application/json"
        except OSError:
            return None


def requests() -> list[tuple[str, Any, str]]:
    """Return (path, request, file name without its extension) of every request to record."""
    from glassformer.studio import schema
    from glassformer.studio.models import ModelStore

    out: list[tuple[str, Any, str]] = []
    models = ModelStore()
    for model, prompt in PROMPTS.items():
        ids = models.get(model).encode(prompt)
        text: dict[str, Any] = {"model": model, "ids": ids}
        by_path: dict[str, Any] = {
            "tokens": schema.Tokens(model=model, text=prompt),
            "vocabulary": schema.ModelRequest(model=model),
            "next": schema.Next(**text),
            "heads": schema.HeadScores(model=model),
            "patterns": schema.Patterns(**text),
            "lens": schema.Lens(**text),
            "attribution": schema.Attribution(**text, position=len(ids) - 1),
            "depth": schema.TextRequest(**text),
            "tensor": schema.TensorRequest(**text, site="blocks.0.attention.pattern", head=0),
        }
        out += [(path, request, f"{model}-{path}") for path, request in by_path.items()]
    for kind in ("sinusoidal", "rotary", "alibi", "t5"):
        request = schema.Positions(kind=kind, **POSITION_DEFAULTS)  # type: ignore[arg-type]
        out.append(("positions", request, f"positions-{kind}"))
    return out


def responses() -> dict[str, tuple[dict[str, Any], bytes]]:
    """Compute all responses. Returns, by file name, the entry of the index and the bytes."""
    from glassformer.studio.api import playground
    from glassformer.studio.app import TORCH_VIEWS
    from glassformer.studio.models import ModelStore

    models = ModelStore(capacity=Limits().models)
    out = {}
    for path, request, name in requests():
        function = playground.next_logits if path == "next" else TORCH_VIEWS[path][1]
        result = function(models, request)
        binary = isinstance(result, TensorResponse)
        file = f"{name}.{'safetensors' if binary else 'json'}"
        row = {"path": path, "body": request.model_dump(mode="json"), "file": file}
        row["type"] = MEDIA_TYPE if binary else "application/json"
        out[file] = (row, result.encode() if binary else to_json(result))
    return out


def write(folder: Path = FOLDER) -> int:
    """Compute and write all responses. Returns how many there are."""
    import torch

    torch.set_num_threads(1)  # the same order of summation on every machine
    folder.mkdir(parents=True, exist_ok=True)
    computed = responses()
    for old in folder.iterdir():
        if old.name not in computed:
            old.unlink()
    for file, (_, data) in computed.items():
        write_atomically(folder / file, data)
    index = {"prompts": PROMPTS, "responses": [row for row, _ in computed.values()]}
    write_atomically(folder / "index.json", json.dumps(index, indent=1).encode() + b"\n")
    return len(computed)


if __name__ == "__main__":
    print(f"{FOLDER.name}: {write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)} responses")
