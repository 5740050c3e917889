"""Convert the LaTeX formulas of the claims to Unicode text for a terminal.

Only the commands that the claims use are supported (a test checks this); an unknown command is printed by its name.
"""

import re
from collections.abc import Iterator

FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$]+?)\$", re.DOTALL)

SIGNS = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "Delta": "Δ", "epsilon": "ε", "varepsilon": "ε",
    "zeta": "ζ", "eta": "η", "theta": "θ", "Theta": "Θ", "kappa": "κ", "lambda": "λ", "Lambda": "Λ", "mu": "μ",
    "nu": "ν", "xi": "ξ", "pi": "π", "rho": "ρ", "sigma": "σ", "Sigma": "Σ", "tau": "τ", "phi": "φ", "varphi": "φ",
    "Phi": "Φ", "chi": "χ", "psi": "ψ", "omega": "ω", "Omega": "Ω", "ell": "ℓ", "partial": "∂", "nabla": "∇",
    "infty": "∞", "le": "≤", "leq": "≤", "ge": "≥", "geq": "≥", "ne": "≠", "neq": "≠", "approx": "≈", "sim": "∼",
    "equiv": "≡", "propto": "∝", "ll": "≪", "gg": "≫", "in": "∈", "notin": "∉", "subset": "⊂", "subseteq": "⊆",
    "cup": "∪", "cap": "∩", "setminus": "∖", "emptyset": "∅", "forall": "∀", "exists": "∃", "to": "→",
    "rightarrow": "→", "mapsto": "↦", "Rightarrow": "⇒", "iff": "⇔", "Leftrightarrow": "⇔", "times": "×",
    "otimes": "⊗", "oplus": "⊕", "odot": "⊙", "circ": "∘", "cdot": "·", "pm": "±", "mp": "∓", "top": "ᵀ",
    "sum": "Σ", "prod": "Π", "int": "∫", "mid": "|",
    "lVert": "\ue000‖", "rVert": "‖\ue000", "lvert": "\ue000|", "rvert": "|\ue000",
    "Vert": "‖", "vert": "|", "langle": "⟨", "rangle": "⟩", "lfloor": "⌊", "rfloor": "⌋", "lceil": "⌈", "rceil": "⌉",
    "dots": "…", "ldots": "…", "cdots": "⋯", "vdots": "⋮", "bot": "⊥", "perp": "⊥", "prime": "′", "ast": "∗",
    "quad": "\u2003", "qquad": "\u2003\u2003", "bmod": " mod ",
}  # fmt: skip
RELATIONS = "≤≥≠≈∼≡∝≪≫∈∉⊂⊆→↦⇒⇔×⊗⊕∪∩±"
FUNCTIONS = ("sin", "cos", "tan", "tanh", "arccos", "arcsin", "arctan", "exp", "ln", "log", "max", "min", "det", "dim",
             "sup", "inf", "lim", "arg", "Pr", "ker", "gcd")  # fmt: skip
SPACES = {",": " ", ";": " ", ":": " ", "!": "", " ": " ", "\\": "; ", "|": "‖"}
BLACKBOARD = {"R": "ℝ", "E": "𝔼", "N": "ℕ", "Z": "ℤ", "Q": "ℚ", "C": "ℂ", "P": "ℙ"}
ACCENTS = {"tilde": "\u0303", "hat": "\u0302", "bar": "\u0304", "vec": "\u20d7", "dot": "\u0307", "overline": "\u0305"}
PLAIN = ("operatorname", "mathrm", "text", "textbf", "mathbf", "boldsymbol", "mathit", "mathcal", "textit", "mbox")
DROPPED = ("left", "right", "big", "Big", "bigl", "bigr", "Bigl", "Bigr", "displaystyle", "limits", "middle")
RAISED = dict(zip("0123456789+-=()abcdefghijklmnoprstuvwxyzABDEGHIJKLMNOPRTUVWᵀ′",
                  "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖʳˢᵗᵘᵛʷˣʸᶻᴬᴮᴰᴱᴳᴴᴵᴶᴷᴸᴹᴺᴼᴾᴿᵀᵁⱽᵂᵀ′",
                  strict=True))  # fmt: skip
LOWERED = dict(zip("0123456789+-=()aehijklmnoprstuvx", "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓ", strict=True))

TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|[{}^_&~]|\s+|[^\\{}^_&~\s]", re.DOTALL)


def split(text: str) -> Iterator[tuple[str, str]]:
    """Split a text into pieces: ("text", ...), ("inline", formula) and ("display", formula)."""
    end = 0
    for found in FORMULA.finditer(text):
        if found.start() > end:
            yield "text", text[end : found.start()]
        yield ("display", found[1]) if found[1] is not None else ("inline", found[2])
        end = found.end()
    if end < len(text):
        yield "text", text[end:]


def commands(latex: str) -> set[str]:
    """Return the names of the commands in a formula that this module does not support."""
    known = {*SIGNS, *FUNCTIONS, *ACCENTS, *PLAIN, *DROPPED, "frac", "tfrac", "dfrac", "sqrt", "mathbb", "begin", "end",
             "binom"}  # fmt: skip
    return {name for name in re.findall(r"\\([a-zA-Z]+)", latex) if name not in known}


def readable(text: str) -> str:
    """Return a text with its formulas as Unicode; a displayed formula gets its own line."""
    pieces = []
    for kind, piece in split(text.strip()):
        if kind == "text":
            pieces.append(piece)
        else:
            pieces.append(f"\n\n    {to_unicode(piece)}\n\n" if kind == "display" else to_unicode(piece))
    return "".join(pieces)


def to_unicode(latex: str) -> str:
    """Convert one formula: `\\frac{a}{b}` becomes a/b; exponents and indices use Unicode characters if they exist."""
    out = _Reader(TOKEN.findall(latex)).all()
    for sign in "‖|":  # a private-use character marks the empty side of a bar
        out = re.sub(rf" *{re.escape(sign)}\ue000", sign, re.sub(rf"\ue000{re.escape(sign)} *", sign, out))
    return re.sub(r" {2,}", " ", out).strip()


class _Reader:
    """Reads tokens from left to right; each method returns finished text."""

    def __init__(self, tokens: list[str]):
        self.tokens, self.at = tokens, 0

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self) -> str:
        token = self.peek()
        self.at += 1
        return token

    def all(self, until: str = "") -> str:
        """Read everything up to the closing token, and the token itself."""
        pieces: list[str] = []
        while (token := self.peek()) and token != until:
            pieces.append(self.script(self.take()) if token in "^_" and token else self.one())
        self.take()
        return "".join(pieces)

    def argument(self) -> str:
        """Read a group or the next single token."""
        while self.peek().isspace():
            self.take()
        return self.one()

    def one(self) -> str:
        token = self.take()
        if token == "{":
            return self.all("}")
        if token.startswith("\\") and len(token) > 1:
            return self.command(token[1:])
        if token in "~&" or token.isspace():
            return " "
        if token == "'":
            return "′"
        if token in ("=", "<", ">"):
            return f" {token} "
        return {"-": "−"}.get(token, token)

    def script(self, sign: str) -> str:
        """Read a superscript or subscript; plain characters are used where Unicode has no small ones."""
        body = self.argument().strip()
        small = (RAISED if sign == "^" else LOWERED).get
        marks = [small({"−": "-"}.get(ch, ch)) for ch in body.replace(" ", "")]
        if all(marks):
            return "".join(str(mark) for mark in marks)
        return f"{sign}{body}" if len(body) == 1 else f"{sign}({body})"

    def command(self, name: str) -> str:
        if name in SIGNS:
            sign = SIGNS[name]
            return f" {sign} " if sign in RELATIONS else sign
        if name in FUNCTIONS:
            return self.spaced(name)
        if name in PLAIN:
            return self.spaced(self.argument())
        if name in ACCENTS:
            body = self.argument()
            return "".join(ch + ACCENTS[name] for ch in body) if name == "overline" else body + ACCENTS[name]
        if name in DROPPED:
            return "" if self.peek() != "." else self.take()[:0]
        if name in ("frac", "tfrac", "dfrac"):
            top, bottom = self.argument(), self.argument()
            return f"{_grouped(top, '+-')}/{_grouped(bottom, '+-/· ')}"
        if name == "sqrt":
            body = self.argument()
            return f"√{body}" if len(body) == 1 or body.isdigit() else f"√({body})"
        if name == "binom":
            return f"C({self.argument()}, {self.argument()})"
        if name == "mathbb":
            return "".join(BLACKBOARD.get(ch, ch) for ch in self.argument())
        if name == "begin":
            return self.matrix()
        return SPACES.get(name, name)  # \{ is a brace, \unknown its own name

    def spaced(self, name: str) -> str:
        """Separate a function's name from following letters by a space, but not from brackets and indices."""
        before = self.tokens[self.at - 2] if self.at > 1 else ""
        after = self.peek()
        lead = " " if before[-1:].isalnum() else ""
        return lead + name + (" " if after[:1].isalnum() or after.startswith("\\") else "")

    def matrix(self) -> str:
        kind = self.argument()
        body = []
        while (token := self.peek()) and token != "\\end":
            body.append(self.script(self.take()) if token in "^_" else self.one())
        self.take()
        self.argument()
        rows = [re.sub(r"\s+", " ", row).strip() for row in "".join(body).split(";")]
        return f"[{'; '.join(row for row in rows if row)}]" if kind != "cases" else f"{{{'; '.join(rows)}}}"


def _grouped(text: str, loose: str) -> str:
    """Add brackets if the text would be ambiguous next to a slash."""
    text = text.strip()
    joined = any(ch in text.replace("−", "-")[1:] for ch in loose) or " " in text
    closed = text.startswith("(") and text.endswith(")") and text.count("(") == 1
    return f"({text})" if joined and not closed else text
