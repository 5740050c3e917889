"""How a comparison refuses: one sentence with what was met and what to do."""

from glassformer.errors import GlassformerError


class CannotCompareError(GlassformerError):
    """The two cannot be compared. The message is one sentence with its remedy."""
