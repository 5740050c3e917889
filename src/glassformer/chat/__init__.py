"""Conversations: rows of data files, chat templates, token ids with the mask of what is learned, and chatting.

Names are imported when first used: training on a text reads rows, and needs no templates.
"""

from typing import TYPE_CHECKING

from glassformer import imported_when_used

_HOMES = {
    "ChatError": "errors",
    "ChatTemplate": "template",
    "Example": "formats",
    "Format": "formats",
    "Rendered": "render",
    "Renderer": "render",
    "read_examples": "formats",
}

__all__ = ["ChatError", "ChatTemplate", "Example", "Format", "Rendered", "Renderer", "read_examples"]

if TYPE_CHECKING:
    from glassformer.chat.errors import ChatError
    from glassformer.chat.formats import Example, Format, read_examples
    from glassformer.chat.render import Rendered, Renderer
    from glassformer.chat.template import ChatTemplate

__getattr__ = imported_when_used(__name__, _HOMES)
