"""The studio: a local page where a Transformer can be seen, changed, trained, checked and mended.

`create_app(Settings())` is the ASGI application; `glass serve` runs it. Nothing here imports torch before it is needed:
the page, its state and the canned results of the bundled models are answered without it.
"""

from glassformer.studio.errors import StudioError
from glassformer.studio.settings import Settings

__all__ = ["Settings", "StudioError"]
