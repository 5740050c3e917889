"""Small models bundled with the package, each trained from a recipe in recipes/ and stored with its run.toml.

`bard-chat` is an adapter of `bard` that answers questions, in peft's format.
"""

from pathlib import Path

NAMES = ("bard", "induction", "bard-chat")
_HERE = Path(__file__).parent
_WEIGHTS = ("model.safetensors", "adapter_model.safetensors")
FOLDERS = {name: _HERE / name for name in NAMES if any((_HERE / name / file).exists() for file in _WEIGHTS)}
"""The folder of each bundled model. An installation may lack some of them."""


def portable_name(path: str | Path) -> str:
    """Return the name of a bundled model for its folder, so that a file can name it on any machine; else the path."""
    place = Path(path).resolve()
    return next((name for name, folder in FOLDERS.items() if folder.resolve() == place), str(path))
