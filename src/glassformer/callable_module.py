"""Lets `gf.size(cfg)` and `gf.generate(model, ...)` be called although `size` and `generate` are modules.

Python binds a submodule's name in its package as soon as anything imports it, so `glassformer.generate` is the package
`generate/` whatever `__init__` says. Giving the module a class with `__call__` makes both readings of the name right.
"""

import importlib
import sys
import types
from typing import Any


def make_callable(module: str, function: str, home: str | None = None) -> None:
    """Make calling the module call its function of that name.

    `home` names another module that has the function. It is imported at the first call, so that the public function may
    use modules which the callable module itself must not import.
    """

    class CallableModule(types.ModuleType):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            owner = self if home is None else importlib.import_module(home)
            return getattr(owner, function)(*args, **kwargs)

    sys.modules[module].__class__ = CallableModule
