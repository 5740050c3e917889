"""Small models bundled with the package, each trained from a recipe in recipes/ and stored with its run.toml."""

from pathlib import Path

NAMES = ("bard", "induction")
_HERE = Path(__file__).parent
FOLDERS = {name: _HERE / name for name in NAMES if (_HERE / name / "model.safetensors").exists()}
"""The folder of each bundled model. An installation may lack some of them."""
