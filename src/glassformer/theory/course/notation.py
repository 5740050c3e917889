"""Rewrite what students type, such as LaTeX, units or vectors in round brackets, into the notation of the parser."""

import re

DEEPEST = 40
"""Number of braces in a text that are rewritten; the parser refuses the braces of a text with more."""
FRACTIONS = str.maketrans({"½": "(1/2)", "⅓": "(1/3)", "⅔": "(2/3)", "¼": "(1/4)", "¾": "(3/4)", "⅛": "(1/8)"})
COMMANDS = {"cdot": "*", "times": "*", "left": "", "right": "", "quad": "", "top": "", "mathrm": "", "text": ""}
"""LaTeX commands that are not the name of a function or a letter."""
LEADING = re.compile(r"^\s*(?:[A-Za-z]\w*(?:\([^)]*\))?\s*)?[=≈~]\s*")
"""The beginning of `d = sqrt(n)`, `f(n) = n` or `≈ 0.25`."""
UNITS = re.compile(r"(?<=[\d)\s])\s*(?:°|degrees?|deg|nats?|parameters|weights|tokens|positions|numbers)\.?\s*$")
SCALES = re.compile(r"(?<=[\d)])\s*(thousand|million|billion|trillion)\b")
POWERS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
TRANSPOSED = re.compile(r"\^\s*(?:T|\{\s*T\s*\}|\\top|\{\s*\\top\s*\}|⊤|ᵀ)\s*$|ᵀ\s*$")


def formula(text: str) -> str:
    """Return a formula without LaTeX commands, dollar signs and typographic fractions."""
    text = text.translate(FRACTIONS).replace("$", " ")
    if ("\\" not in text and "{" not in text) or text.count("{") > DEEPEST:
        return text
    return _Latex(text).read()


def value(text: str) -> str:
    """Return a number without what stands in front of it (`p = `) and behind it (`degrees`, `billion`)."""
    text = UNITS.sub("", LEADING.sub("", text))
    return SCALES.sub(lambda found: f"*10^{POWERS[found[1]]}", text)


def is_decimal_comma(text: str) -> bool:
    """Return whether a text is one number with a decimal comma, such as 0,25. (1,024 is a number with groups.)"""
    return re.fullmatch(r"\s*[-−+]?(?:\d+,(?:\d{1,2}|\d{4,})|0,\d+)\s*%?\s*", text) is not None


def rows(text: str) -> str:
    """Return a matrix with square brackets where vectors are in round ones, and without a sign of transposition."""
    text = TRANSPOSED.sub("", text.strip())
    found, opened, is_vector = list(text), list[int](), dict[int, bool]()
    for at, sign in enumerate(text):
        if sign == "(":
            opened.append(at)
            is_vector[at] = False
        elif sign in ",;" and opened:
            is_vector[opened[-1]] = True
        elif sign == ")" and opened:
            start = opened.pop()
            called = start > 0 and (text[start - 1].isalnum() or text[start - 1] == "_")
            if is_vector[start] and not called:
                found[start], found[at] = "[", "]"
    return "".join(found)


class _Latex:
    """Reads a text from left to right; braces become round brackets and fractions become divisions."""

    def __init__(self, text: str):
        self.text, self.at = text, 0

    def read(self, end: str = "") -> str:
        found = ""
        while self.at < len(self.text) and self.text[self.at] != end:
            found += self.piece()
        self.at += bool(end)
        return found

    def piece(self) -> str:
        sign = self.text[self.at]
        if sign == "\\":
            return self.command()
        self.at += 1
        if sign == "{":
            return f"({self.read('}')})"
        if sign == "_" and self.text[self.at : self.at + 1] == "{":
            self.at += 1
            return f"_{self.read('}')}"  # the index of a letter: d_{k} is d_k
        return sign

    def command(self) -> str:
        name = re.compile(r"\\([A-Za-z]*)").match(self.text, self.at)
        assert name is not None
        self.at = name.end()
        if not name[1]:  # a space such as \,
            self.at += 1
            return " "
        if name[1] in ("frac", "dfrac", "tfrac"):
            above, below = self.argument(), self.argument()
            return f"(({above})/({below}))"
        if name[1] == "sqrt":
            return f" sqrt({self.argument()})"
        return f" {COMMANDS.get(name[1], name[1])} "

    def argument(self) -> str:
        """Return what is in the next braces, or the next sign alone."""
        while self.text[self.at : self.at + 1] == " ":
            self.at += 1
        if self.text[self.at : self.at + 1] == "{":
            self.at += 1
            return self.read("}")
        return self.piece() if self.at < len(self.text) else ""
