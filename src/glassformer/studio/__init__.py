"""The studio: a local web page to inspect, train, check, diagnose and size Transformers.

`create_app(Settings())` returns the ASGI application; `glass serve` runs it. torch is imported only when it is needed:
the page, its state and the recorded responses of the bundled models are served without it.
"""

from glassformer.studio.errors import StudioError
from glassformer.studio.settings import Settings

__all__ = ["Settings", "StudioError"]
