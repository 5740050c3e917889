"""docs/families.md is written by `python -m tests.weights.page`, which takes minutes. Here: it names every family."""

import re
from pathlib import Path

import pytest

from glassformer import config as c
from glassformer.config import presets
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
        assert "not tried" not in cells, kind


def test_the_column_of_gpu_kernels_names_the_outermost_field():
    pytest.importorskip("glassformer.kernels")
    from tests.weights.page import on_gpu

    plain = presets.llama_tiny(d_model=36, n_heads=6)  # sizes that no kernel takes do not count
    latent = c.Attention(6, d_head=12, d_value=8, bias=False, latent=c.Latent(kv_rank=14, d_shared=4))
    assert on_gpu(plain) == "yes"
    shared = c.Rotary(fraction=1 / 3)
    assert on_gpu(c.replace(plain, attention=latent, position=shared)) == "graph: attention.latent"
    assert on_gpu(presets.t5_small()) == "graph"
    assert on_gpu(presets.bert_base()) == "no"
