"""The error of this room."""

from glassformer.errors import GlassformerError


class ChatError(GlassformerError):
    """Conversations, templates or data files that cannot be used. The message is one sentence."""
