"""Small models that come with the package, each trained here by a recipe in recipes/ and kept with its run.toml."""

from pathlib import Path

NAMES = ("bard", "induction")


def folder(name: str) -> Path | None:
    """The model folder of a bundled model; None when there is none of that name."""
    path = Path(__file__).parent / name
    return path if name in NAMES and (path / "model.safetensors").exists() else None
