"""Write a self-contained HTML page: `render` fills one of the jinja2 templates in `templates/`.

Every value is escaped when it is inserted. The only exception is `Markup`, which only the SVG and MathML writers of
this folder and the claims page return, for markup whose text they have escaped themselves. All pages extend
`base.html`, whose content security policy forbids scripts and network requests.
"""

import functools
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

TEMPLATES = Path(__file__).parent / "templates"
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def clean(text: object) -> str:
    """Replace what XML cannot contain (control characters, U+0000, lone surrogates) with U+FFFD."""
    return _FORBIDDEN.sub("\ufffd", str(text))


@functools.cache
def environment() -> Environment:
    """Return the jinja2 environment of all pages. An undefined name is an error, not an empty string."""
    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(template: str, **context: Any) -> str:
    """Return the whole page as text that can be encoded as UTF-8."""
    return clean(environment().get_template(template).render(**context))
