"""How a studio is set up: which models it may name, who may ask, where it keeps things, and its limits."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from glassformer.studio.errors import StudioError

CONFIGS = ("config.json", "model.toml", "run.toml")
"""A folder with none of them is no model's."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Limits:
    """What one request may ask for. The page reads them from /api/state."""

    body_bytes: int = 1 << 20
    upload_bytes: int = 20_000_000
    text_characters: int = 20_000
    tokens: int = 1024
    """Of one prompt; a model's own context may be shorter."""
    new_tokens: int = 1024
    beams: int = 8
    steps: int = 32
    """Of a beam search."""
    tensor_bytes: int = 16_000_000
    pattern_bytes: int = 64_000_000
    """144 heads over 512 tokens are 38 MB."""
    quick_workers: int = 2
    quick_waiting: int = 32
    long_waiting: int = 4
    """Claims, the doctor and patching: one at a time, this many more wait."""
    quick_seconds: float = 60.0
    long_seconds: float = 1800.0
    streams: int = 64
    """Open event streams of training runs."""
    runs: int = 1
    """Trainings that run at once."""
    kept_runs: int = 100
    corpora: int = 50
    models: int = 4
    """Loaded at once; the one used longest ago goes first."""
    parameters: int = 50_000_000
    """Of a model trained here."""
    training_bytes: int = 8_000_000_000
    """Predicted for training, from the size sheet."""
    training_steps: int = 200_000


LIMITS = Limits()


@dataclass(frozen=True)
class Settings:
    """One studio."""

    models: tuple[Path, ...] = ()
    """Model folders beside the bundled ones; only these can be named by a request."""
    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    """What a request must carry; needed where `host` is not this machine alone."""
    folder: Path = field(default_factory=lambda: default_folder())
    """Where uploads and training runs are kept."""
    warm: bool = True
    """Import torch in the background after the first page; without it, torch must be there already."""
    limits: Limits = LIMITS

    def __post_init__(self) -> None:
        if not self.is_local and not self.token:
            raise StudioError(
                f"host {self.host} can be reached from other machines: give a token too, which each request must carry."
            )
        if self.token is not None and not re.fullmatch(r"[A-Za-z0-9._~-]{8,200}", self.token):
            raise StudioError("a token is 8 to 200 letters, digits and . _ ~ -: give another one.")
        for path in self.models:
            if not path.is_dir():
                raise StudioError(f"{path} is not a folder: --model names a folder with a model.")
            if not any((path / name).is_file() for name in CONFIGS):
                raise StudioError(f"{path} has no {' nor '.join(CONFIGS)}: --model names a folder with a model.")
        above = next((path for path in (self.folder, *self.folder.parents) if path.exists()), None)
        if above is not None and not above.is_dir():
            raise StudioError(f"{above} is a file: --folder names a folder for uploads and training runs.")

    @property
    def is_local(self) -> bool:
        return self.host in LOOPBACK


def default_folder() -> Path:
    """$GLASSFORMER_STUDIO, or the user's data folder."""
    given = os.environ.get("GLASSFORMER_STUDIO")
    if given:
        return Path(given).expanduser()
    import platformdirs

    return Path(platformdirs.user_data_dir("glassformer", appauthor=False)) / "studio"
