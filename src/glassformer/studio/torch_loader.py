"""Import torch once, in a background thread, so that the page appears before it is imported."""

import importlib
import logging
import sys
import threading
from typing import Literal

from glassformer.studio.errors import LoadingError, UnavailableError

State = Literal["loading", "ready", "failed"]

MODULES = (
    *("glassformer.weights", "glassformer.generation", "glassformer.lens", "glassformer.training"),
    *("glassformer.lens.figures", "glassformer.lens.views", "matplotlib.backends.backend_svg"),
)
"""Modules imported after torch, so that the first request does not wait for them."""
log = logging.getLogger("glassformer.studio")


class TorchLoader:
    """Import torch in the background. `start` starts the import once; `require` raises until it is finished."""

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
        """Start the import, unless it was started already or `warm` is False."""
        with self._lock:
            if not self.warm or self._thread is not None:
                return
            self._thread = threading.Thread(target=self._import, name="import-torch", daemon=True)
            self._thread.start()

    def _import(self) -> None:
        try:
            import torch

            for module in MODULES:
                importlib.import_module(module)
            # Each worker thread has its own OpenMP threads: together no more than there are cores.
            torch.set_num_threads(max(1, torch.get_num_threads() // self.workers))
        except Exception as error:
            log.exception("torch cannot be imported")
            self.error = f"torch cannot be imported here ({type(error).__name__}: {error})."
        self.done.set()

    def require(self) -> None:
        """Start the import if necessary, and raise LoadingError until it is finished."""
        self.start()
        if self.error is not None:
            raise UnavailableError(self.error)
        if not self.done.is_set():
            raise LoadingError("torch is still being imported: try again in a moment.")
