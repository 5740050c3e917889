"""How this package refuses: one sentence with the value, the rule and the remedy."""

from collections.abc import Iterable


class WeightsError(ValueError):
    """A folder that cannot be read or written. The message gives the value, the rule and the remedy."""


IN_OURS = "save with format='glass' (`glass convert --to glass`)"
"""The remedy for a model that no Hugging Face family can hold: our own folders hold every model."""


def some(items: Iterable[object], limit: int = 5) -> str:
    """`3: a, b and c`, or the first `limit` of many with the count of the rest."""
    texts = [str(item) for item in items]
    shown = ", ".join(texts[:limit])
    return f"{len(texts)}: {shown}" + (f" and {len(texts) - limit} more" if len(texts) > limit else "")
