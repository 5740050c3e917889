"""docs/families.md is written by `python -m tests.weights.page`, which takes minutes. Here: it names every family."""

import re
from pathlib import Path

from glassformer.weights.families import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "families.md"


def test_every_model_type_is_on_the_page():
    text = PAGE.read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([\w-]+)` \|(.*)\|$", text, re.M))
    missing = [kind for family in FAMILIES for kind in family.types if f"`{kind}`" not in text]
    assert missing == []
    for kind, cells in rows.items():
        difference, saves = (cell.strip() for cell in cells.split("|")[1:3])
        assert float(difference) <= 1e-4, kind
        assert saves == "yes", kind
