"""Read a formula that a student typed, without running it: a tokenizer, a parser with a fixed list of names, a value.

The text never reaches `eval` or `sympify`. Numbers are computed by mpmath with 40 digits. Every step refuses
values that would take long to compute, so that no short text can occupy the machine.
"""

import functools
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import mpmath

from glassformer.errors import GlassformerError, nearest
from glassformer.theory.course import notation

DIGITS = 40
LONGEST = 400
"""Characters of a text that is read at all."""
LARGEST = 20_000
"""Bound of the natural logarithm of every intermediate value."""
DEEPEST = 60


class UnreadableError(GlassformerError):
    """A text that is not a formula. The message is one sentence and names the first problem."""


FUNCTIONS: dict[str, tuple[int | None, Callable[..., Any]]] = {
    "exp": (1, mpmath.exp),
    "ln": (1, mpmath.log),
    "log": (1, mpmath.log),
    "log2": (1, lambda x: mpmath.log(x, 2)),
    "log10": (1, mpmath.log10),
    "sqrt": (1, mpmath.sqrt),
    "sin": (1, mpmath.sin),
    "cos": (1, mpmath.cos),
    "tan": (1, mpmath.tan),
    "tanh": (1, mpmath.tanh),
    "arccos": (1, mpmath.acos),
    "acos": (1, mpmath.acos),
    "abs": (1, abs),
    "min": (None, min),
    "max": (None, max),
}
"""Each function with its number of arguments; None: one or more."""
CONSTANTS: dict[str, Callable[[], Any]] = {"pi": lambda: +mpmath.pi, "e": lambda: mpmath.exp(1)}
SIGNS = str.maketrans({"−": "-", "–": "-", "·": "*", "×": "*", "⋅": "*", "÷": "/", "π": " pi ", "√": " sqrt ",
                       "λ": " lambda ", "η": " eta ", "θ": " theta ", "ω": " omega ", "ε": " eps ", "β": " beta ",
                       "α": " alpha ", "τ": " tau ", "[": "(", "]": ")", "²": "^2", "³": "^3"})  # fmt: skip
TOKEN = re.compile(r"\s*(?:(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)|([A-Za-z]\w*)|(\*\*|[-+*/^(),%]))")
GROUPED = re.compile(r"(?<![\w.])\d{1,3}(?:,\d{3})+(?![\d,])")


@dataclass(frozen=True)
class Node:
    """A number (its text), a name, a function call or an operation."""

    kind: str
    text: str
    parts: tuple["Node", ...] = ()


@functools.lru_cache(maxsize=1024)
def parse(text: str, names: tuple[str, ...] = ()) -> Node:
    """Return the tree of a formula whose letters are `names`; raise UnreadableError with one sentence."""
    if len(text) > LONGEST:
        raise UnreadableError(f"the answer has {len(text)} characters: use at most {LONGEST}.")
    if not text.strip():
        raise UnreadableError("the answer is empty: type a number or a formula.")
    text = GROUPED.sub(lambda found: found[0].replace(",", ""), text)
    return _Parser(_tokens(notation.formula(text).translate(SIGNS)), names).read()


def _tokens(text: str) -> list[tuple[str, str]]:
    found, at, text = [], 0, text.rstrip()
    while at < len(text):
        token = TOKEN.match(text, at)
        if token is None:
            raise UnreadableError(
                f"{text[at:].strip()[0]!r} has no meaning here: use numbers, letters, + - * / ^ and ( )."
            )
        at = token.end()
        number, name, sign = token.groups()
        found.append(("number", number) if number else ("name", name) if name else ("sign", sign.replace("**", "^")))
    return found


class _Parser:
    """A recursive-descent parser. `2d` and `3(n+1)` are products; a name before a bracket is a function."""

    def __init__(self, tokens: list[tuple[str, str]], names: tuple[str, ...]):
        self.tokens, self.names, self.at, self.depth = tokens, names, 0, 0

    def peek(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else ""

    def take(self, sign: str) -> None:
        if self.peek() != sign:
            here = repr(self.peek()) if self.peek() else "the end"
            raise UnreadableError(f"{sign!r} is missing before {here}.")
        self.at += 1

    def read(self) -> Node:
        tree = self.sum()
        if self.at < len(self.tokens):
            raise UnreadableError(f"{self.peek()!r} is not expected there: check the brackets and the operators.")
        return tree

    def deepen(self) -> None:
        self.depth += 1
        if self.depth > DEEPEST:
            raise UnreadableError(f"the formula is nested more than {DEEPEST} deep: write a simpler one.")

    def sum(self) -> Node:
        self.deepen()
        left = self.product()
        while self.peek() in ("+", "-"):
            sign = self.peek()
            self.at += 1
            left = Node("operation", sign, (left, self.product()))
        self.depth -= 1
        return left

    def product(self) -> Node:
        left = self.signed()
        while (sign := self.peek()) in ("*", "/") or self._implicit():
            if sign in ("*", "/"):
                self.at += 1
            else:
                sign = "*"
            left = Node("operation", sign, (left, self.signed()))
        return left

    def _implicit(self) -> bool:
        return self.at < len(self.tokens) and (self.tokens[self.at][0] in ("number", "name") or self.peek() == "(")

    def signed(self) -> Node:
        if self.peek() in ("-", "+"):
            sign = self.peek()
            self.at += 1
            self.deepen()
            inner = self.signed()
            self.depth -= 1
            return Node("operation", "-", (Node("number", "0"), inner)) if sign == "-" else inner
        return self.power()

    def power(self) -> Node:
        base = self.atom()
        if self.peek() == "%":
            self.at += 1
            base = Node("operation", "/", (base, Node("number", "100")))
        if self.peek() == "^":
            self.at += 1
            self.deepen()
            base = Node("operation", "^", (base, self.signed()))
            self.depth -= 1
        return base

    def atom(self) -> Node:
        if self.at >= len(self.tokens):
            raise UnreadableError("the formula ends too early: something is missing after the last sign.")
        kind, text = self.tokens[self.at]
        if kind == "sign" and text != "(":
            raise UnreadableError(f"{text!r} is not expected there: a number, a letter or ( must come first.")
        self.at += 1
        if kind == "number":
            return Node("number", text)
        if text == "(":
            inner = self.sum()
            self.take(")")
            return inner
        return self.name(text)

    def name(self, text: str) -> Node:
        if text in self.names:
            return Node("name", text)
        if text in FUNCTIONS:
            return self.call(text)
        if text in CONSTANTS:
            return Node("name", text)
        others = [name for name in self.names if name.lower() == text.lower()]
        if len(others) == 1:  # `n` where the letter is N
            return Node("name", others[0])
        if not self.names and len(text) <= 2:
            raise UnreadableError(f"{text!r} is a letter, and the answer is a number: put in its value.")
        known = [*self.names, *FUNCTIONS, *CONSTANTS]
        raise UnreadableError(f"{text!r} is not known here.{nearest(text, known, others='Known names:')}")

    def call(self, text: str) -> Node:
        wanted, _ = FUNCTIONS[text]
        if self.peek() != "(" and wanted == 1 and self.at < len(self.tokens):
            return Node("call", text, (self.atom(),))  # `sqrt 2`, `√2`
        self.take("(")
        parts = [self.sum()]
        while self.peek() == ",":
            self.at += 1
            parts.append(self.sum())
        self.take(")")
        if wanted is not None and len(parts) != wanted:
            raise UnreadableError(f"{text} takes {wanted} value, not {len(parts)}.")
        return Node("call", text, tuple(parts))


def evaluate(tree: Node, values: Mapping[str, Any] | None = None) -> Any:
    """Return the value with 40 digits as an mpmath number; raise UnreadableError where it is not a real number."""
    with mpmath.workdps(DIGITS):
        return _evaluate(tree, values or {})


def _evaluate(tree: Node, values: Mapping[str, Any]) -> Any:
    if tree.kind == "number":
        exponent = re.search(r"[eE]([+-]?\d+)", tree.text)
        if len(tree.text) > 60 or (exponent and abs(int(exponent[1])) > 5000):
            raise UnreadableError(f"the number {tree.text[:20]}… is too long: use fewer digits.")
        return mpmath.mpf(tree.text)
    if tree.kind == "name":
        return to_mpf(values[tree.text]) if tree.text in values else CONSTANTS[tree.text]()
    parts = [_evaluate(part, values) for part in tree.parts]
    try:
        found = _call(tree.text, parts) if tree.kind == "call" else _operation(tree.text, *parts)
    except ZeroDivisionError:
        raise UnreadableError("the formula divides by zero.") from None
    except ValueError:
        raise UnreadableError(f"{tree.text} has no value there.") from None
    if isinstance(found, mpmath.mpc) or not mpmath.isfinite(found):
        raise UnreadableError(f"{tree.text} has no real value there.")
    return found


def _call(name: str, parts: list[Any]) -> Any:
    if name == "exp" and abs(parts[0]) > LARGEST:
        raise UnreadableError("the formula contains a value that is too large.")
    if name in ("sin", "cos", "tan") and abs(parts[0]) > 10**12:
        raise UnreadableError(f"the argument of {name} is too large.")
    if name in ("ln", "log", "log2", "log10") and parts[0] <= 0:
        raise UnreadableError(f"{name} needs a positive argument.")
    return FUNCTIONS[name][1](*parts)


def _operation(sign: str, left: Any, right: Any) -> Any:
    match sign:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            found = left * right
        case "/":
            found = left / right
        case _:
            if left != 0 and abs(right * mpmath.log(abs(left))) > LARGEST:
                raise UnreadableError("the formula contains a value that is too large.")
            found = left**right
    if found and not isinstance(found, mpmath.mpc) and abs(mpmath.log(abs(found))) > LARGEST:
        raise UnreadableError("the formula contains a value that is too large.")
    return found


def to_mpf(value: Any) -> Any:
    return mpmath.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else mpmath.mpf(value)


def number(text: str) -> Any:
    """Return the value of a number such as `0.25`, `1/4`, `25 %`, `3,145,728` or `e/(e+1)`."""
    if notation.is_decimal_comma(text):
        raise UnreadableError(f"{text.strip()} has a decimal comma: write {text.strip().replace(',', '.')}.")
    return evaluate(parse(notation.value(text)))


def to_sympy(tree: Node) -> Any:
    """Return the formula as a sympy expression, to print it. Nothing is simplified."""
    import sympy

    if tree.kind == "number":
        return sympy.Rational(tree.text) if len(tree.text) < 30 else sympy.Float(tree.text)
    if tree.kind == "name":
        return {"pi": sympy.pi, "e": sympy.E}.get(tree.text) or sympy.Symbol(tree.text)
    parts = [to_sympy(part) for part in tree.parts]
    if tree.kind == "call":
        made = {"ln": sympy.log, "arccos": sympy.acos, "abs": sympy.Abs, "min": sympy.Min, "max": sympy.Max}
        if tree.text in ("log2", "log10"):
            return sympy.log(parts[0]) / sympy.log(int(tree.text[3:]))
        function = made[tree.text] if tree.text in made else getattr(sympy, tree.text)
        return function(*parts)
    left, right = parts
    match tree.text:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
        case "/":
            return left / right
    return sympy.Pow(left, right, evaluate=False)


def points(domains: Mapping[str, Sequence[Any]], count: int = 14) -> list[dict[str, Any]]:
    """Return points of a domain: the same ones each time. A domain is a list of values for each letter."""
    rng = random.Random(0)
    return [{name: rng.choice(list(values)) for name, values in domains.items()} for _ in range(count)]
