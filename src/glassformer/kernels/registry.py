"""What a kernel is, and which configs it supports.

Every accelerated implementation is one `Kernel`: what it replaces, for which calls it can be used, how accurate it is,
and which test holds it to that. Support is an allow-list. A kernel lists the config fields it implements and the values
of each; a field that it does not list must have its default value. A field that is added to the config later is
therefore refused by every kernel until somebody implements it.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from glassformer.config import ModelConfig

P = ParamSpec("P")
Answer = TypeVar("Answer")
Rule = Collection[Any] | Callable[[Any], bool]
"""The supported values of a config field: a collection of them, or a predicate."""


def remembered(size: int) -> Callable[[Callable[P, Answer]], Callable[P, Answer]]:
    """Let a function keep its last `size` answers: each generation asks again what a config supports.

    A config that was made with lists in place of tuples has no hash; its answer is computed each time.
    """

    def decorate(compute: Callable[P, Answer]) -> Callable[P, Answer]:
        kept: Any = functools.lru_cache(size)(compute)

        @functools.wraps(compute)
        def answer(*given: P.args, **named: P.kwargs) -> Answer:
            try:
                hash(given)
            except TypeError:
                return compute(*given, **named)
            found: Answer = kept(*given, **named)
            return found

        answer.__dict__["cache_clear"] = kept.cache_clear
        return answer

    return decorate


def any_value(value: Any) -> bool:
    """The rule of a field whose every value is supported."""
    return True


def any_values(names: str, part: str = "") -> dict[str, Rule]:
    """Return the rules of fields (of a part) whose every value is supported; `names` are separated by blanks."""
    return dict.fromkeys((f"{part}.{name}" if part else name for name in names.split()), any_value)


POSITION_FIELDS: dict[str, Rule] = {
    **any_values("position.offset position.base position.fraction"),
    "position.layout": {"interleaved", "halves"},
    "position.spacing": {"exclusive", "inclusive"},
    "position.pairing": {"halves", "interleaved"},
    "position.scaling": {None, "linear", "ntk", "yarn", "llama3"},
    **any_values("position.scaling.factor position.scaling.original_max_len position.scaling.attention_factor"),
    **any_values("position.scaling.beta_fast position.scaling.beta_slow position.scaling.truncate"),
    **any_values("position.scaling.low_freq_factor position.scaling.high_freq_factor"),
}
"""Fields of learned, sinusoidal and rotary positions, for kernels that read tables which the model itself computes."""


@dataclass(frozen=True)
class Kernel:
    """One accelerated implementation."""

    name: str
    """The name that `glass env`, `glass sample` and `glass train` report."""
    replaces: str
    """What of the package computes the same without it."""
    supports: Callable[..., str | None]
    """Return None if the kernel can be used for a call, or else the reason why not."""
    accuracy: str
    """How far its results may be from what it replaces."""
    test: str
    """The test file that compares the two."""


def unsupported_field(config: ModelConfig, allowed: Mapping[str, Rule]) -> str | None:
    """Return which field of a config a kernel does not support, or None.

    `allowed` maps fields to rules. Fields of a part are written `attention.qk_norm`. A part is also a field itself,
    whose value is its kind: {"position": {"learned", "rotary"}, "position.base": any_value}.
    """
    return next((reason for _, reason in unsupported_fields(config, allowed)), None)


def unsupported_fields(config: ModelConfig, allowed: Mapping[str, Rule]) -> Iterator[tuple[str, str]]:
    """Yield every field of a config that a kernel does not support, with the reason."""
    for name, value, default in config_fields(config):
        rule = allowed.get(name)
        if rule is None:
            supported = value == default
        else:
            supported = rule(value) if callable(rule) else value in rule
        if not supported:
            yield name, f"{name}={value!r} is not supported by the kernel"


_REQUIRED = object()
"""The default of a field that has none: no value equals it, so a kernel must list the field."""


def config_fields(part: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, value, default) of every field of a config, parts included. The value of a part is its kind."""
    for field in dataclasses.fields(part):
        name, value = prefix + field.name, getattr(part, field.name)
        default = _default(field)
        if not dataclasses.is_dataclass(value):
            yield name, value, _kind(default)
            continue
        yield name, _kind(value), _kind(default)
        yield from config_fields(value, f"{name}.")


def _default(field: "dataclasses.Field[Any]") -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else _REQUIRED


def _kind(value: Any) -> Any:
    """The kind of a part, such as `rotary`; any other value is itself."""
    if not dataclasses.is_dataclass(value):
        return value
    return getattr(value, "kind", type(value).__name__)
