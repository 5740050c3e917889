"""How an examination refuses: one sentence with what was met and what to do."""

from glassformer.errors import GlassformerError


class CannotExamineError(GlassformerError):
    """The subject cannot be examined at all. The message is one sentence with its remedy."""


class Unsupported(Exception):  # noqa: N818 - a missing capability, not an error of anybody's
    """This subject lacks what a probe needs; the probe becomes a SKIP with this reason."""
