"""The generated pages of docs/ are current, and what they link to is there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from glassformer.theory.claims.documents import PAGES, github
from glassformer.theory.claims.registry import coverage, load_all

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_the_pages_are_current(name):
    """`make docs` writes them."""
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), f"docs/{name} is stale: run `make docs`"


def anchors(text):
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_every_link_leads_somewhere():
    texts = {name: page() for name, page in PAGES.items()}
    known = {name: anchors(text) for name, text in texts.items()}
    ids = {id for row in coverage() for id in row.items}
    for name, text in texts.items():
        for target in re.findall(r"\]\(([^)]+)\)", text):
            page, _, anchor = target.partition("#")
            assert not anchor or anchor in known[page or name] or anchor in ids - set(load_all()), target


def test_every_row_claim_and_erratum_is_there():
    claims, errata = PAGES["claims.md"](), PAGES["errata.md"]()
    table = claims[claims.index("## Sources and results") :]
    assert all(f"\n| {row.cite} |" in table for row in coverage())
    assert "ABSENT: the document jumps" in table
    for claim in load_all().values():
        assert f"\n### {claim.id}\n" in claims
        assert f"glass check {claim.id}" in claims
        for erratum in claim.errata:
            assert f"\n## {erratum.id}\n" in errata
            assert erratum.example.strip() in errata


def test_code_in_the_errata_runs_as_printed():
    blocks = re.findall(r"```python\n(.*?)```", PAGES["errata.md"](), re.DOTALL)
    assert len(blocks) == sum(len(claim.errata) for claim in load_all().values())
    for block in blocks[:5]:  # all of them run with their claims
        names = {}
        exec(block, names)
        assert not names["holds"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so $a_1 \le 2$", r"so $a_1 \le 2$"),
        (r"$A \, B$", r"$`A \, B`$"),
        (r"$(W)_{ij}$", r"$`(W)_{ij}`$"),
        (r"$a < b$", r"$`a < b`$"),
        ("a_b * c", r"a\_b \* c"),
        ("see $$x$$ here", "see \n\n```math\nx\n```\n\n here"),
    ],
)
def test_formulas_survive_markdown(text, expected):
    assert github(text) == expected


@pytest.mark.slow
def test_the_command_writes_into_a_folder(tmp_path):
    command = [sys.executable, "-m", "glassformer.theory.claims.documents"]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=True)
    assert len(done.stdout.split()) == len(PAGES)
    assert (tmp_path / "errata.md").read_text() == PAGES["errata.md"]()
    missing = subprocess.run([*command, str(tmp_path / "no")], capture_output=True, text=True, check=False)
    assert missing.returncode == 2
    assert "there is no folder" in missing.stderr
