"""Chat templates: Jinja programs that come with a model and turn messages into text.

A template is somebody else's program. It runs in Jinja's immutable sandbox, its loops stop after `SECONDS`, and no text
in it grows beyond `CHARACTERS`. Whatever it raises becomes one sentence.

The environment is that of `transformers`, so that the text is the same: `trim_blocks`, `lstrip_blocks`, loop controls,
a `generation` block around what the assistant writes, a `tojson` filter without escapes, and the functions
`raise_exception` and `strftime_now`.
"""

import datetime
import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace

from glassformer.chat.errors import ChatError

SECONDS = 5.0
CHARACTERS = 1 << 24
CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}
{%- else %}
{{- message['content'] + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""The template for models that have none."""
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
PLAIN = """\
{%- for message in messages %}
{{- message['role'].capitalize() + ': ' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{ message['content'] + (eos_token or '') + '\\n' }}{% endgeneration %}
{%- else %}
{{- message['content'] + '\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- 'Assistant: ' }}
{%- endif %}
"""
"""Words and line breaks only: it needs no new token. An answer ends with the end-of-text token if there is one."""
TEMPLATES = {"chatml": CHATML, "plain": PLAIN}
"""The templates that a run can name."""
OPEN, CLOSE, GUARD = "\ue0f0", "\ue0f1", "\ue0f2"
"""Marks in rendered text, from the private use area: the ends of a `generation` block, and both ends of a text in a
content that looks like a token. They are removed before anyone sees the text."""
_TICK, _JOIN = "_glass_tick", "_glass_join"


@dataclass(frozen=True)
class RenderedText:
    """The text of a conversation."""

    text: str
    answers: list[tuple[int, int]] = field(default_factory=list)
    """Characters (begin, end) of the `generation` blocks."""
    literal: list[tuple[int, int]] = field(default_factory=list)
    """Characters that look like a token but were written in a content, where they mean nothing."""


class ChatTemplate:
    """A chat template that is compiled once. `tokens` are texts such as `bos_token` that templates refer to."""

    def __init__(self, source: str, tokens: Mapping[str, str] | None = None):
        self.source, self.tokens = _without_marks(source), dict(tokens or {})
        self.environment = _environment()
        try:
            self.compiled = self.environment.from_string(self.source)
            tree = self.environment.parse(self.source)
        except TemplateSyntaxError as error:
            raise ChatError(f"the chat template is not valid Jinja (line {error.lineno}: {error.message}).") from None
        except RecursionError:
            raise ChatError("the chat template is nested too deeply to be read: use another.") from None
        literals = {node.data for node in tree.find_all(nodes.TemplateData)}
        self.has_generation = OPEN in literals
        self.writes_tools = "tools" in meta.find_undeclared_variables(tree)
        literals |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        self.literals = "\0".join(sorted(literals))
        """The texts that the template itself writes or compares with."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        answer: bool = False,
        tools: Sequence[Any] | None = None,
        guard: Callable[[str, str], str] | None = None,
    ) -> RenderedText:
        """Return the text of messages. With `answer`, it ends where the assistant's answer begins.

        `guard(text, role)` is applied to every text in the messages; it puts a GUARD at both ends of what looks like a
        token and is none. Marks that a message itself contains are removed.
        """
        if tools and not self.writes_tools:
            raise ChatError("there are tools, and the chat template does not write any: use another template.")
        clean = functools.partial(_plain, guard=guard)
        given = [clean(_with_reasoning(message), str(message.get("role"))) for message in messages]
        self.environment.deadline = time.monotonic() + SECONDS
        try:
            marked = self.compiled.render(
                messages=given,
                tools=None if not tools else clean(list(tools), "tools"),
                documents=None,
                add_generation_prompt=answer,
                **self.tokens,
            )
        except ChatError:
            raise
        except SecurityError as error:
            raise ChatError(f"the chat template does what a template must not do ({_reason(error)}).") from None
        except TemplateError as error:
            raise ChatError(f"the chat template refuses these messages: {_reason(error)}.") from None
        except RecursionError:
            raise ChatError("the chat template calls itself without end: use another template.") from None
        except Exception as error:  # whatever the program in the template does wrong
            raise ChatError(f"the chat template fails with {type(error).__name__}: {_reason(error)}.") from None
        return _remove_marks(marked)


def _reason(error: Exception) -> str:
    """Return the message of an error on one line, without a full stop."""
    return " ".join(str(error).split()).rstrip(".")[:300] or type(error).__name__


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose reasoning has all the names that templates use for it."""
    names = ("reasoning_content", "thinking", "reasoning")
    found = next((message[name] for name in names if message.get(name) is not None), None)
    return dict(message) if found is None else {"thinking": found, **message, "reasoning_content": found}


def _plain(value: Any, role: str, guard: Callable[[str, str], str] | None) -> Any:
    """Return values as plain JSON types, because methods of other objects could be called from a template."""
    if isinstance(value, str):
        text = _without_marks(str.__str__(value))
        return text if guard is None else guard(text, role)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {
            str(key): held if key == "role" and isinstance(held, str) else _plain(held, role, guard)
            for key, held in value.items()
        }
    if isinstance(value, Sequence):
        return [_plain(one, role, guard) for one in value]
    return f"<{type(value).__name__}>"


def _without_marks(text: str) -> str:
    for mark in (OPEN, CLOSE, GUARD):
        text = text.replace(mark, "")
    return text


def _remove_marks(marked: str) -> RenderedText:
    parts: list[str] = []
    answers: list[tuple[int, int]] = []
    literal: list[tuple[int, int]] = []
    opened: list[int] = []
    guarded: int | None = None
    at = begin = 0
    for index, sign in enumerate(marked):
        if sign not in (OPEN, CLOSE, GUARD):
            continue
        parts.append(marked[begin:index])
        at, begin = at + index - begin, index + 1
        if sign == OPEN:
            opened.append(at)
        elif sign == CLOSE and opened:
            answers.append((opened.pop(), at))
        elif sign == GUARD:
            if guarded is not None:
                literal.append((guarded, at))
            guarded = at if guarded is None else None
    return RenderedText("".join((*parts, marked[begin:])), answers, literal)


# The environment


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}`: the text in between is what the assistant writes."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        opened, closed = (nodes.Output([nodes.TemplateData(mark)]) for mark in (OPEN, CLOSE))
        return nodes.Scope([opened, *body, closed]).set_lineno(line)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, whose loops and joined texts are limited."""

    intercepted_binops = frozenset({"*", "**", "+"})
    deadline = float("inf")

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse a template, and let each turn of a loop and each joined text call a check."""
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            check = nodes.ExprStmt(nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None))
            loop.body.insert(0, check.set_lineno(loop.lineno))
        for joined in list(tree.find_all(nodes.Concat)):
            call = nodes.Call(nodes.Name(_JOIN, "load"), list(joined.nodes), [], None, None)
            call.lineno, joined.nodes = joined.lineno, [call]
        return tree

    def tick(self) -> str:
        if time.monotonic() > self.deadline:
            raise ChatError(f"the chat template was stopped after {SECONDS:g} s, because its loops do not end.")
        return ""

    def join(self, *parts: Any) -> str:
        self.tick()
        texts = [str(part) for part in parts]
        _limit(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            _limit(1000 * abs(right) if isinstance(right, int) else 0)
        elif operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, int) and hasattr(other, "__len__"):
                    _limit(one * len(other))
        elif hasattr(left, "__len__") and hasattr(right, "__len__"):
            _limit(len(left) + len(right))
        return super().call_binop(context, operator, left, right)


def _limit(size: int) -> None:
    if size > CHARACTERS:
        raise ChatError(f"the chat template makes a text of {size:,} characters: the limit is {CHARACTERS:,}.")


def _environment() -> _Environment:
    made = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    made.filters["tojson"] = _to_json
    made.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda format: datetime.datetime.now().strftime(format),
        "dict": _Dict(),
        "namespace": _Namespace,
        _TICK: made.tick,
        _JOIN: made.join,
    }
    return made


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return text.replace(json.dumps(GUARD)[1:-1], GUARD) if ensure_ascii else text


def _raise(message: str) -> None:
    raise TemplateError(message)


class _Dict:
    """`dict` of a template, without the attributes of the type."""

    def __call__(self, *given: Any, **named: Any) -> dict[Any, Any]:
        return dict(*given, **named)

    def fromkeys(self, *given: Any) -> dict[Any, Any]:
        return dict.fromkeys(*given)


class _Namespace(Namespace):
    """`namespace` of a template, without names that begin with an underscore."""

    def __init__(*given: Any, **named: Any) -> None:
        self, *rest = given
        values = dict(*rest, **named)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have {name!r}")
