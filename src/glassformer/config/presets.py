"""Named configs as functions: the tables of presets.toml.

`NAME()` is the model as published; `NAME(n_layers=2, n_heads=4)` is the same with some fields changed, spelled as in
`glassformer.config.replace`. A new `d_model` also scales the feed-forward (`gpt2(d_model=96)` has d_ff=384) and the
scales of T5, of Gemma and of Vaswani's Transformer, unless they are given too. The number of heads stays, and their
width where `d_head` is published (T5, Qwen3).
"""

import functools
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glassformer.config import ConfigError, ModelConfig, from_dict
from glassformer.config.schema import merge_tables, vary
from glassformer.errors import nearest

Preset = Callable[..., ModelConfig]
_TABLES: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _table(name: str) -> dict[str, Any]:
    """Return the fields of a preset, with those of the preset that it is like."""
    own = {key: value for key, value in _TABLES[name].items() if key not in ("about", "like")}
    return merge_tables(_table(_TABLES[name]["like"]), own) if "like" in _TABLES[name] else own


@functools.cache
def _published(name: str) -> ModelConfig:
    return from_dict(_table(name))


def _preset(name: str) -> Preset:
    """Return the function of a preset."""

    def preset(**changes: Any) -> ModelConfig:
        return vary(_published(name), changes)

    preset.__name__ = preset.__qualname__ = name
    preset.__doc__ = _TABLES[name]["about"].strip()
    return preset


ALL: dict[str, Preset] = {name: _preset(name) for name in _TABLES}
globals().update(ALL)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Preset: ...


def get(name: str, **changes: Any) -> ModelConfig:
    """Return the preset called `name`, changed. Dashes, dots and capitals do not matter: "GPT2-medium" works."""
    if not isinstance(name, str):
        raise ConfigError(f"a preset is named by text such as 'gpt2', not by {type(name).__name__}.")
    spelled = name.lower().replace("-", "_").replace(".", "_")
    if spelled not in ALL:
        raise ConfigError(f"{name!r} is not a preset.{nearest(spelled, ALL, others='Use one of')}")
    return ALL[spelled](**changes)
