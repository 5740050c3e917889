"""Rules by which byte-level BPE splits a text before merging, with their names in llama.cpp.

A rule is a list of steps as `tokenizer.json` has them under `pre_tokenizer`. A tokenizer whose steps are not in the
table is refused instead of guessed, because a wrong rule gives wrong tokens without any other sign.
"""

from dataclasses import dataclass
from typing import Any

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_SLASHED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_ENDINGS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
QWEN2 = rf"{_ENDINGS}|{_WORDS}|\p{{N}}|{_REST}"
GPT4O = (_CASED % (f"{_ENDINGS}?", f"{_ENDINGS}?")) + rf"|\p{{N}}{{1,3}}|{_SLASHED}"
TEKKEN = (_CASED % ("", "")) + rf"|\p{{N}}|{_SLASHED}"
CL100K = rf"{_ENDINGS}|{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s+$|\s*[\r\n]|\s+(?!\S)|\s"


@dataclass(frozen=True)
class Split:
    """A splitting rule: the names it has in llama.cpp, its expression, and whether digits are split first."""

    names: tuple[str, ...]
    expression: str
    single_digits: bool = False
    ignore_merges: bool = False
    """True if a piece that is a token itself is not built by merges."""

    def steps(self) -> dict[str, Any]:
        """Return the `pre_tokenizer` of tokenizer.json."""
        digits = [{"type": "Digits", "individual_digits": True}] if self.single_digits else []
        if self.expression == GPT2:
            steps = [*digits, byte_level(use_regex=True)]
            return steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps}
        split = {"type": "Split", "pattern": {"Regex": self.expression}, "behavior": "Isolated", "invert": False}
        return {"type": "Sequence", "pretokenizers": [*digits, split, byte_level(use_regex=False)]}


def byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": use_regex}


def byte_signs() -> list[str]:
    """Return the printable character that stands for each byte in a byte-level vocabulary."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]


SPLITS = (
    Split(("gpt-2", "phi-2", "olmo", "mpt", "jais", "mellum", "exaone4"), GPT2),
    Split(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), LLAMA3, ignore_merges=True),
    Split(("dbrx", "smaug-bpe", "chatglm-bpe"), LLAMA3),
    Split(("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan"), QWEN2),
    Split(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), GPT2, single_digits=True
    ),
    Split(("gpt-4o", "llama4"), GPT4O),
    Split(("tekken",), TEKKEN, ignore_merges=True),
)


def by_name(name: str) -> Split | None:
    """Return the rule with a name of llama.cpp; None if it is not known."""
    return next((split for split in SPLITS if name in split.names), None)


def recognize(steps: Any, ignore_merges: bool) -> Split | None:
    """Return the rule that the `pre_tokenizer` of a tokenizer.json describes; None if it is not known."""
    plain = _plain(steps)
    return next((s for s in SPLITS if s.ignore_merges == ignore_merges and _plain(s.steps()) == plain), None)


def _plain(steps: Any) -> list[Any]:
    """Return the steps without what does not change tokens, in one spelling."""
    if not isinstance(steps, dict):
        return [steps]
    if steps.get("type") == "Sequence":
        return [part for step in steps.get("pretokenizers", []) for part in _plain(step)]
    if steps.get("type") == "Split" and steps.get("pattern") == {"Regex": GPT2}:
        return []  # the byte-level step would split by the same expression
    kept = {key: value for key, value in steps.items() if key != "trim_offsets"}
    if kept.get("type") == "Split" and kept.get("behavior") == "Removed" and kept.get("invert"):
        kept |= {"behavior": "Isolated", "invert": False}  # the expression matches every character
    return [kept]
