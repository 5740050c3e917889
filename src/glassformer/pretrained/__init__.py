"""Small models bundled with the package, each trained from a recipe in recipes/ and stored with its run.toml."""

from pathlib import Path

NAMES = ("bard", "induction")


def folder(name: str) -> Path | None:
    """Return the folder of a bundled model; None if there is no model of that name."""
    path = Path(__file__).parent / name
    return path if name in NAMES and (path / "model.safetensors").exists() else None
