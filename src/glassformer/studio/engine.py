"""torch, imported once in the background, so that the page is there before it."""

import importlib
import logging
import sys
import threading
from typing import Literal

from glassformer.studio.errors import LoadingError, UnavailableError

State = Literal["loading", "ready", "failed"]

ROOMS = (
    *("glassformer.weights", "glassformer.generation", "glassformer.lens", "glassformer.training"),
    *("glassformer.lens.figures", "glassformer.lens.views", "matplotlib.backends.backend_svg"),
)
"""Imported after torch, so that the first request does not wait for them, nor break off their import by leaving."""
log = logging.getLogger("glassformer.studio")


class Engine:
    """Knows whether torch can be used. `start` imports it in a thread, once; `require` refuses until it is there."""

    def __init__(self, warm: bool = True, workers: int = 2):
        self.warm, self.workers = warm, workers
        self.done = threading.Event()
        self.error: str | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        if "torch" in sys.modules and not warm:
            self.done.set()

    @property
    def state(self) -> State:
        if self.error is not None:
            return "failed"
        return "ready" if self.done.is_set() else "loading"

    def start(self) -> None:
        """Begin to import, unless that has begun or is not wanted."""
        with self._lock:
            if not self.warm or self._thread is not None:
                return
            self._thread = threading.Thread(target=self._import, name="import-torch", daemon=True)
            self._thread.start()

    def _import(self) -> None:
        try:
            import torch

            for room in ROOMS:
                importlib.import_module(room)
            # each worker has its own team of threads: together no more than there are cores
            torch.set_num_threads(max(1, torch.get_num_threads() // self.workers))
        except Exception as error:
            log.exception("torch cannot be imported")
            self.error = f"torch cannot be imported here ({type(error).__name__}: {error})."
        self.done.set()

    def require(self) -> None:
        """Raises LoadingError until torch can be used."""
        self.start()
        if self.error is not None:
            raise UnavailableError(self.error)
        if not self.done.is_set():
            raise LoadingError("torch is still being imported: ask again in a moment.")
