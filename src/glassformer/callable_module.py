"""Lets `gf.size(cfg)` and `gf.generate(model, ...)` be called although `size` and `generate` are modules.

Python binds a submodule's name in its package as soon as anything imports it, so `glassformer.generate` is the package
`generate/` whatever `__init__` says. Giving the module a class with `__call__` makes both readings of the name right.
"""

import sys
import types
from typing import Any


def make_callable(module: str, function: str) -> None:
    """Calling the module from now on calls its function of that name."""

    class CallableModule(types.ModuleType):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return getattr(self, function)(*args, **kwargs)

    sys.modules[module].__class__ = CallableModule
