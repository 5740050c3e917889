"""Settings of a studio: the models it serves, its address and token, its data folder, and its limits."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from glassformer.studio.errors import StudioError

CONFIGS = ("config.json", "model.toml", "run.toml")
"""A model folder has at least one of these files."""
ADAPTERS = ("adapter_config.json", "adapter.toml")
"""An adapter folder has one of these files."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Limits:
    """Limits of requests and of the server. The page reads them from /api/state."""

    body_bytes: int = 1 << 20
    upload_bytes: int = 20_000_000
    text_characters: int = 20_000
    tokens: int = 1024
    """Tokens of one prompt; the context of a model may be shorter."""
    new_tokens: int = 1024
    beams: int = 8
    steps: int = 32
    """Steps of a beam search."""
    tensor_bytes: int = 16_000_000
    pattern_bytes: int = 64_000_000
    """For comparison: 144 heads over 512 tokens are 38 MB."""
    quick_workers: int = 2
    quick_waiting: int = 32
    long_waiting: int = 4
    """Queue length for claims, the doctor and patching, which run one at a time."""
    quick_seconds: float = 60.0
    long_seconds: float = 1800.0
    streams: int = 64
    """Event streams of training runs that may be open at once."""
    runs: int = 1
    """Training runs at once."""
    kept_runs: int = 100
    corpora: int = 50
    models: int = 4
    """Models in memory at once; the least recently used one is dropped."""
    parameters: int = 50_000_000
    """Parameters of a model trained here."""
    training_bytes: int = 8_000_000_000
    """Peak memory of a training run, predicted by `glassformer.sizing`."""
    training_steps: int = 200_000


LIMITS = Limits()


@dataclass(frozen=True)
class Settings:
    """Settings of one studio."""

    models: tuple[Path, ...] = ()
    """Model folders to serve in addition to the bundled models. A request cannot name any other folder."""
    adapters: tuple[tuple[Path, Path | None], ...] = ()
    """Adapter folders to serve, each with the model into which it is merged; None for the model that it names."""
    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    """Token that each request must carry; required if `host` is reachable from other machines."""
    folder: Path = field(default_factory=lambda: default_folder())
    """Folder for uploads and training runs."""
    warm: bool = True
    """Import torch in the background once the page is drawn. If False, torch must be imported already."""
    limits: Limits = LIMITS

    def __post_init__(self) -> None:
        if not self.is_local and not self.token:
            raise StudioError(
                f"host {self.host} is reachable from other machines: give a token (--token TEXT), "
                "which each request must carry."
            )
        if self.token is not None and not re.fullmatch(r"[A-Za-z0-9._~-]{8,200}", self.token):
            raise StudioError("the token is not valid: use 8 to 200 letters, digits and the characters . _ ~ -")
        for path in self.models:
            if not path.is_dir():
                raise StudioError(f"{path} is not a folder: --model names a folder with a model.")
            if not any((path / name).is_file() for name in (*CONFIGS, *ADAPTERS)):
                raise StudioError(f"{path} has none of {', '.join(CONFIGS)}: --model names a folder with a model.")
        for path, _ in self.adapters:
            if not any((path / name).is_file() for name in ADAPTERS):
                raise StudioError(f"{path} has none of {', '.join(ADAPTERS)}: --adapter names an adapter folder.")
        existing = next((path for path in (self.folder, *self.folder.parents) if path.exists()), None)
        if existing is not None and not existing.is_dir():
            raise StudioError(f"{existing} is a file: --folder names a folder for uploads and training runs.")

    @property
    def is_local(self) -> bool:
        return self.host in LOOPBACK


def default_folder() -> Path:
    """Return $GLASSFORMER_STUDIO, or a folder in the user's data directory."""
    given = os.environ.get("GLASSFORMER_STUDIO")
    if given:
        return Path(given).expanduser()
    import platformdirs

    return Path(platformdirs.user_data_dir("glassformer", appauthor=False)) / "studio"
