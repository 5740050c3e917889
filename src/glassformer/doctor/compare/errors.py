"""How a comparison refuses: one sentence with what was met and what to do."""


class CannotCompareError(ValueError):
    """The two cannot be compared. The message is one sentence with its remedy."""
