"""A small text to train tokenizers on, and texts that are hard to split."""

import pydoc_data.topics

TEXT = " ".join(
    pydoc_data.topics.topics[name] for name in ("for", "if", "while", "class", "lambda", "yield", "strings")
)
LINES = [line for line in TEXT.splitlines() if line.strip()]
HARD = (
    "Hello world",
    "  two spaces  and   three ",
    "tabs\tand\nnewlines\n\n\nhere",
    "Ünïcödé 你好 🙂 naïve",
    "12345 67,890.12",
    "'tis don't I'll WE'VE",
    "ﬁne ½ ① ＡＢＣ",
    "def f(x):\n        return x**2  # CamelCase HTTP2Server",
    "",
    " ",
    "a",
)
