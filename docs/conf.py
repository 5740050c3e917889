"""Settings of the documentation site, which `make site` builds with Sphinx into docs/_build. Nothing is fetched."""

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from sphinx.application import Sphinx  # noqa: E402
from sphinx.util.docutils import nodes  # noqa: E402

import glassformer  # noqa: E402
from glassformer.pages.mathml import mathml  # noqa: E402

project = "glassformer"
copyright = "the glassformer authors, MIT licence"
version = release = glassformer.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "glassformer"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
pygments_style, pygments_dark_style = "a11y-light", "github-dark"

myst_enable_extensions = ["dollarmath", "html_image"]
myst_heading_anchors = 4
myst_fence_as_directive = ["math"]
html_math_renderer = "mathml"

default_role = "code"  # docstrings are written with single backticks
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
maximum_signature_line_length = 88
python_display_short_literal_types = True


TICKS = re.compile(r"(`[^`]*`)")
OUTSIDE = re.compile(r"(?<!!)\[([^\]]+)\]\((?:\.\./)+(?:src|tests|recipes|notebooks|README|CONTRIBUTING)[^)]*\)")


def as_myst(app: Sphinx, name: str, source: list[str]) -> None:
    """Rewrite what code hosts and Sphinx write differently: formulas in backticks, links to files outside docs/."""
    source[0] = OUTSIDE.sub(r"\1", re.sub(r"\$`([^`\n]+)`\$", r"$\1$", source[0]))


def as_rst(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Make a docstring reStructuredText: indented lines are shown as they are, and |x| is no substitution."""
    found, in_block, in_list = list[str](), False, False
    for line in lines:
        indented = line.startswith("  ")
        in_list = line.startswith(("- ", "* ", ":", ".. ")) or (in_list and (indented or not line))
        if indented and not in_list:
            found += [] if in_block else ["", "::", ""]
            found.append("  " + line)
            in_block = True
            continue
        if in_block and line:
            found.append("")
        in_block = in_block and not line
        found.append(
            "".join(re.sub(r"\|", r"\\|", part) if i % 2 == 0 else part for i, part in enumerate(TICKS.split(line)))
        )
    lines[:] = found


def inline_formula(visitor: nodes.NodeVisitor, node: nodes.math) -> None:
    """Write a formula inside a sentence as MathML."""
    visitor.body.append(str(mathml(node.astext())))
    raise nodes.SkipNode


def display_formula(visitor: nodes.NodeVisitor, node: nodes.math_block) -> None:
    """Write a formula on a line of its own as MathML."""
    visitor.body.append(f'<div class="formula">{mathml(node.astext(), block=True)}</div>')
    raise nodes.SkipNode


def copy_images(app: Sphinx, error: Exception | None) -> None:
    """Copy the pictures that pages show by HTML, which Sphinx does not collect."""
    if error is None:
        shutil.copytree(ROOT / "docs" / "images", Path(app.outdir) / "images", dirs_exist_ok=True)


def setup(app: Sphinx) -> None:
    app.connect("source-read", as_myst)
    app.connect("build-finished", copy_images)
    app.connect("autodoc-process-docstring", as_rst, priority=600)  # after napoleon
    app.add_html_math_renderer("mathml", (inline_formula, None), (display_formula, None))
