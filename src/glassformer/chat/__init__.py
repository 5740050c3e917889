"""Conversations: rows of data files, chat templates, token ids with the mask of what is learned, and chatting."""

from glassformer.chat.errors import ChatError
from glassformer.chat.formats import Example, Format, read_examples
from glassformer.chat.render import Rendered, Renderer
from glassformer.chat.template import ChatTemplate

__all__ = ["ChatError", "ChatTemplate", "Example", "Format", "Rendered", "Renderer", "read_examples"]
