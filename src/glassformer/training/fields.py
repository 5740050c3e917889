"""Every field of a run file with its type, default and documentation, read from the dataclasses themselves.

`glass train --fields` prints this list, and `make docs` writes the same text to docs/run_file.md.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from glassformer.config import presets
from glassformer.config.model import MODEL_KINDS, ModelConfig
from glassformer.training.data import tasks
from glassformer.training.run import SECTIONS, Run

INTRODUCTION = """
A run file is TOML. Every field has a default, so a run file holds only what differs from it. Without `preset`, [model]
changes the preset `nano`:

```toml
[model]
preset = "nano"
n_layers = 6
[data]
corpus = "mytext.txt"
[loop]
steps = 5000
```

`glass train RUN.toml` trains it; `glass train mytext.txt` trains the defaults on a text. `--set SECTION.FIELD=VALUE`
changes one field, such as `--set optim.lr=3e-4`, and may be repeated. The value "none" means that an optional field is
not set.
"""


@dataclass(frozen=True)
class Field:
    """One field of a run file."""

    name: str
    """With its section, as `--set` takes it: optim.lr."""
    type: str
    choices: tuple[str, ...]
    """The allowed values, if these are names; empty otherwise."""
    default: str | None
    """As TOML; None if a value is required."""
    doc: str

    def text(self) -> str:
        given = "required" if self.default is None else f"default {self.default}"
        return textwrap.fill(
            f"- `{self.name}` ({self.type}; {given})" + (f": {self.doc}" if self.doc else ""),
            120,
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )


@dataclass(frozen=True)
class Section:
    """The fields under one heading, such as [optim]."""

    heading: str
    doc: str
    fields: tuple[Field, ...]

    def text(self) -> str:
        listed = "\n".join(field.text() for field in self.fields)
        return "\n\n".join(part for part in (f"## {self.heading}", self.doc, listed) if part)


def sections() -> list[Section]:
    """Return every section of a run file, those of the model last."""
    plain = [field for field in dataclasses.fields(Run) if field.name in ("seed", "out")]
    top = _fields(Run, "", [field.name for field in plain])
    found = [Section("Top level", "These two fields come before the first section.", top)]
    found += [Section(f"[{name}]", _doc(kind), _fields(kind, name)) for name, kind in SECTIONS.items()]
    for name, task in tasks.TASKS.items():
        found.append(Section(f'[task] with data.corpus = "task:{name}"', _doc(task), _fields(task, "task")))
    return [*found, *_model_sections()]


def _model_sections() -> Iterator[Section]:
    names = tuple(presets.ALL)
    doc = (
        "A preset, which the other fields of the model then change (`n_layers = 6`, `attention__bias = false`). "
        f"Presets: {', '.join(names)}. Without a preset, all required fields of a model are needed."
    )
    preset = Field("model.preset", "text", names, '"nano"', doc)
    kind = Field("model.kind", _one_of(tuple(MODEL_KINDS)), tuple(MODEL_KINDS), '"decoder"', "The kind of model.")
    common = _fields(ModelConfig, "model")
    yield Section("[model]", "The architecture.", (preset, kind, *common))
    inherited = {field.name for field in dataclasses.fields(ModelConfig)}
    for name, config in MODEL_KINDS.items():
        own = [field.name for field in dataclasses.fields(config) if field.name not in inherited]
        if own:
            yield Section(f'[model] with kind = "{name}"', _doc(config), _fields(config, "model", own))
    yield from _parts(ModelConfig, "model", set())


def _parts(owner: type, where: str, seen: set[type]) -> Iterator[Section]:
    """Yield the tables below a table, each variant of a part once: under the first table that has it."""
    hints = typing.get_type_hints(owner)
    parts = [
        (f"{where}.{field.name}", option)
        for field in dataclasses.fields(owner)
        for option in _options(hints[field.name])
        if dataclasses.is_dataclass(option) and isinstance(option, type) and option not in seen
    ]
    seen |= {option for _, option in parts}
    for name, option in parts:
        variant = f' with kind = "{option.kind}"' if hasattr(option, "kind") else ""
        yield Section(f"[{name}]{variant}", _doc(option), _fields(option, name))
        yield from _parts(option, name, seen)


def _fields(owner: Any, where: str, names: list[str] | None = None) -> tuple[Field, ...]:
    hints, docs = typing.get_type_hints(owner), field_docs(owner)
    return tuple(
        Field(
            f"{where}.{field.name}".strip("."),
            *_type(hints[field.name]),
            _default(field),
            docs.get(field.name, ""),
        )
        for field in dataclasses.fields(owner)
        if names is None or field.name in names
    )


def _choices(field: "dataclasses.Field[Any]") -> Iterator[str]:
    """Descriptions of the values of a field, which its type's own table gives (see `sections.Optim.kind`)."""
    described = [f"`{name}`: {text}" for name, text in field.metadata.get("choices", {}).items()]
    if described:
        yield "; ".join(described) + "."


@functools.cache  # finding the source of a class means parsing its module
def field_docs(owner: type) -> dict[str, str]:
    """Return the strings under the fields of a dataclass, read from its source because Python does not keep them."""
    docs: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for field, after in itertools.pairwise(tree.body):
            match field, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docs[name] = " ".join(text.split())
    for described in dataclasses.fields(owner):
        docs[described.name] = " ".join([docs.get(described.name, ""), *_choices(described)]).strip()
    return docs


def _doc(owner: type) -> str:
    text = inspect.cleandoc(owner.__doc__ or "")
    return "\N{MINUS SIGN}" + text[1:] if text.startswith("-") else text  # a hyphen would begin a list in Markdown


def _options(hint: Any) -> tuple[Any, ...]:
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if is_union else (hint,)


def _type(hint: Any) -> tuple[str, tuple[str, ...]]:
    """Return the type of a field in words, and its choices if it has a fixed set of them."""
    words: list[str] = []
    choices: list[str] = []
    for option in _options(hint):
        if typing.get_origin(option) is Literal:
            choices += [str(value) for value in typing.get_args(option)]
        elif dataclasses.is_dataclass(option):
            if hasattr(option, "kind"):
                choices.append(str(option.kind))
            words = words or ["a table"]
        elif typing.get_origin(option) is tuple and dataclasses.is_dataclass(typing.get_args(option)[0]):
            words.append("a list of tables")
        elif option is not type(None):
            of_numbers = float in typing.get_args(option)
            words.append(_WORDS.get(option, "a list of numbers" if of_numbers else "a list of integers"))
    if choices:
        words = [f"{words[0]} with kind {_one_of(tuple(choices))}" if words else _one_of(tuple(choices))]
    return " or ".join(words), tuple(choices)


_WORDS = {int: "integer", float: "number", bool: "true or false", str: "text", tuple[str, ...]: "a list of texts"}


def _one_of(names: tuple[str, ...]) -> str:
    return " | ".join(f'"{name}"' for name in names)


def _default(field: "dataclasses.Field[Any]") -> str | None:
    value = field.default
    if value is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    match value:
        case dataclasses.MISSING:
            return None
        case None:
            return '"none"'
        case bool():
            return str(value).lower()
        case str():
            return f'"{value}"'
        case tuple():
            return str(list(value))
        case int() | float():
            return f"{value:g}" if isinstance(value, float) else str(value)
    return f'kind = "{value.kind}"' if hasattr(value, "kind") else "the defaults of the table"


def run_file_page() -> str:
    """Return the list as Markdown."""
    return "\n\n".join(["# Run files", INTRODUCTION.strip(), *(section.text() for section in sections())]) + "\n"


def fields_to_dict() -> dict[str, Any]:
    """Return the list for `--json`."""
    return {"sections": [dataclasses.asdict(section) for section in sections()]}
