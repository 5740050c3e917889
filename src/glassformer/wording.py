"""Words that messages share."""


def plural(count: int, noun: str, several: str = "") -> str:
    """Return a count with its noun, such as `1 claim` or `1,200 claims`."""
    return f"{count:,} {noun if count == 1 else several or noun + 's'}"
