"""Annotations executed at every call: shapes and dtypes by jaxtyping, all other types by beartype.

jaxtyping's own hook looks at arguments twice, by way of a bound signature, and does so for functions without tensors as
well, which is half of the time of a test of the engine. Here each value is looked at once.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, get_args

import beartype
import jaxtyping

active = True
"""Whether calls are checked now: the tests of rooms that only use the engine leave it out, a fifth of their time."""
_typed = beartype.beartype(conf=beartype.BeartypeConf(violation_type=TypeError))


def check_calls_of(modules: Sequence[str]) -> None:
    """In modules not yet imported, a value that breaks its annotation is a TypeError."""
    jaxtyping.jaxtyped = lambda *, typechecker: checked  # what the hook writes over each function and class
    jaxtyping.install_import_hook(modules, None)


def checked(made: Any) -> Any:
    """A function, or a dataclass's `__init__`, with its annotations executed. Equal letters are equal sizes."""
    if inspect.isclass(made):
        if dataclasses.is_dataclass(made):
            made.__init__ = checked(made.__init__)
        return made
    made.__annotations__ = {name: _resolved(hint, made.__globals__) for name, hint in made.__annotations__.items()}
    typed = _typed(made)
    return _when_active(made, _with_sizes(typed) if any(map(_has_tensor, made.__annotations__.values())) else typed)


def _when_active(made: Callable[..., Any], strict: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(made)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (strict if active else made)(*args, **kwargs)

    return call


def _with_sizes(typed: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _jaxtyped("context"):
            return typed(*args, **kwargs)

    return call


_jaxtyped = jaxtyping.jaxtyped


def _resolved(hint: Any, names: dict[str, Any]) -> Any:
    """A hint given as text; one that only the type checker can read allows everything, as does a protocol.

    Python 3.11 lists a protocol's methods anew at each look, and who lacks one fails by itself.
    """
    try:
        found = eval(hint, names) if isinstance(hint, str) else hint
    except NameError:
        return Any
    return Any if getattr(found, "_is_protocol", False) else found


def _has_tensor(hint: Any) -> bool:
    own = inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray)
    return own or any(map(_has_tensor, get_args(hint)))
