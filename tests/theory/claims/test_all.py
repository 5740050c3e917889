"""Every claim: it passes, its control makes it fail, its errata refute, its figure draws, its words are complete."""

import ast
import re
import xml.etree.ElementTree as ElementTree
from importlib.resources import files

import pytest
from latex2mathml.converter import convert

import glassformer as gf
from glassformer.finding import Verdict
from glassformer.theory.claims import CHAPTERS, Badge, Kind, Truth, coverage
from glassformer.theory.claims.claim import PLACEHOLDER, id_pattern
from glassformer.theory.claims.formulas import commands, split
from glassformer.theory.claims.run import Plan, draw, examine

IDS = [  # the claims that must be there; others may be added
    "convex-weights-upper-bound",
    "softmax-row-stochastic",
    "softmax-shift-invariance",
    "orthogonal-inputs-fixed-point",
    "dot-product-variance",
    "unit-variance-scaling",
    "attention-output-convex-hull",
    "multihead-block-sum",
    "multihead-value-output-merge",
    "multihead-separation",
    "attention-kronecker-form",
    "dense-vs-attention-params",
    "permutation-equivariance",
    "order-needs-position",
    "high-dim-orthogonality",
    "angle-table",
    "concat-linear-split",
    "concat-vs-add",
    "sinusoid-shift-rotation",
    "sine-only-fails",
    "sinusoid-relative-score",
    "sinusoid-frequency-spectrum",
    "rope-relative",
    "pe-extrapolation",
    "unigram-mle",
    "autoregressive-table-growth",
    "ngram-final-token",
    "ngram-storage",
    "greedy-vs-best",
    "block-param-count",
    "moe-ffn-fraction",
    "gpt2-small-param-count",
    "weight-tying-saving",
    "weight-tying-expressivity",
    "bert-large-param-count",
    "chinchilla-allocation",
    "jl-dimension",
    "residual-stream-sum",
    "prenorm-vs-postnorm",
    "architecture-masks",
    "decoder-only-rationale",
    "encoder-from-decoder",
    "kv-cache-exact",
    "kv-cache-validity",
    "kv-cache-cost",
    "generation-bug-triage",
    "preln-block-shape",
    "gpt-logits-shape",
    "decoding-samplers",
    "gpt2-logits-match",
    "train-nano-gpt",
    "attention-rank-bound",
    "multihead-rank-bound",
    "linear-attention-gd",
    "softmax-attention-kernel-smoother",
    "rank-collapse-rate",
    "rank-collapse-depth",
    "induction-head-circuit",
    "induction-head-detection",
    "grokking-weight-norm",
    "numpy-attention",
    "rnn-vs-transformer",
    "mlp-vs-transformer",
    "worked-example-qkv",
    "worked-example-pattern",
]
ERRATA = [f"E{n:02d}" for n in range(1, 62) if n not in (4, 59)]
WITHOUT_FIGURE = {
    "softmax-shift-invariance", "multihead-value-output-merge", "concat-linear-split", "ngram-storage",
    "weight-tying-saving", "decoder-only-rationale", "gpt-logits-shape", "numpy-attention",
}  # fmt: skip
CLAIMS = dict(gf.claims.ALL)
"""What there is; `test_the_registry_holds_the_contract` compares it with what there must be."""
QUICK = [id for id, claim in CLAIMS.items() if not claim.slow]
SLOW = [id for id, claim in CLAIMS.items() if claim.slow]


def formulas(claim):
    texts = [claim.title, claim.statement, claim.control, *claim.derivation]
    texts += [text for e in claim.errata for text in (e.states, e.fails, e.correct)]
    return [(text, piece) for text in texts for kind, piece in split(text) if kind != "text"]


def test_the_registry_holds_the_contract():
    assert len(IDS) == len(set(IDS)) == 65
    assert set(IDS) <= set(CLAIMS)


def test_every_erratum_is_there_once():
    ids = [e.id for claim in CLAIMS.values() for e in claim.errata]
    assert len(ids) == len(set(ids))
    assert len(ERRATA) == 59
    assert sorted({id.rstrip("ab") for id in ids}) == ERRATA


def test_all_rows_of_the_coverage_table_point_at_claims_and_errata():
    rows = coverage()
    assert len(rows) == 91
    assert {id for row in rows for id in row.items} == set(CLAIMS)
    assert {id for row in rows for id in row.errata} == set(ERRATA)
    assert [row.cite for row in rows if not row.items] == ["Bishop 12.14"]
    assert {row.cite for row in rows if row.verdict is Truth.ABSENT} == {"Bishop 12.14", "CSCI 5922 PS4 Q3c"}


@pytest.mark.parametrize("id", CLAIMS)
def test_errata_are_those_of_the_sources_they_name(id):
    rows = {row.cite: row for row in coverage()}
    for erratum in CLAIMS[id].errata:
        assert erratum.sources
        for cite in erratum.sources:
            assert erratum.id.rstrip("ab") in rows[cite].errata, (erratum.id, cite)
        named = {cite for cite, row in rows.items() if erratum.id in row.errata}
        assert not named or named == set(erratum.sources), (erratum.id, named)


@pytest.mark.parametrize("id", CLAIMS)
def test_words_are_complete(id):
    claim = CLAIMS[id]
    assert claim.id == id
    assert claim.chapter in CHAPTERS
    assert len(claim.derivation) >= 2
    assert claim.sources
    assert claim.kinds
    words = [claim.title, claim.statement, claim.control, *claim.derivation]
    words += [text for e in claim.errata for text in (e.states, e.fails, e.correct, e.example)]
    assert all(len(text.strip()) > 10 for text in words)
    assert all(text.count("$") % 2 == 0 for text in words[: 3 + len(claim.derivation)])
    assert all(e.flaw in ("wrong", "incomplete", "imprecise", "absent", "arithmetic") for e in claim.errata)
    assert all("holds =" in e.example for e in claim.errata)
    assert not any(re.search(r"^holds = (True|False)\b", e.example, re.MULTILINE) for e in claim.errata)


MODULES = sorted({(claim.chapter, claim.module) for claim in CLAIMS.values()})


@pytest.mark.parametrize(("chapter", "module"), MODULES)
def test_every_id_has_a_reason_and_every_reason_an_id(chapter, module):
    """Also of evidence that only --slow examines."""
    source = (files("glassformer.theory.claims") / chapter / f"{module}.py").read_text(encoding="utf-8")
    tree = ast.parse(source)
    own = [claim for claim in CLAIMS.values() if (claim.chapter, claim.module) == (chapter, module)]
    keys = [key for claim in own for key in claim.evidence]
    assert keys
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        made = re.fullmatch(r"lab\.(exact|exhaustive|statistical|numerical|empirical)|solve", ast.unparse(call.func))
        id = call.args[made[0] == "solve"] if made else None
        if isinstance(id, ast.Constant):
            assert any(re.fullmatch(id_pattern(key), id.value) for key in keys), id.value
    strings = "\n".join(str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant))
    strings += "".join(str(claim.data) for claim in own)
    for key in keys:  # the text around its placeholders is in the strings of the module, or a name of the data
        assert all(text in strings for text in re.split(rf"{PLACEHOLDER.pattern}|, ", key)[::2] if text), key


@pytest.mark.parametrize("id", CLAIMS)
def test_a_badge_does_not_promise_more_than_its_evidence(id):
    claim = CLAIMS[id]
    exact = {Kind.EXACT, Kind.EXHAUSTIVE} & set(claim.kinds)
    if claim.badge is Badge.PROVED:
        assert exact
    if claim.badge is Badge.ILLUSTRATED:
        assert set(claim.kinds) & {Kind.EMPIRICAL, Kind.NUMERICAL, Kind.STATISTICAL}


@pytest.mark.parametrize("id", CLAIMS)
def test_formulas_can_be_read_by_browser_and_terminal(id):
    for text, latex in formulas(CLAIMS[id]):
        assert not commands(latex), text
        tree = ElementTree.fromstring(convert(latex))
        assert not re.search(r"\\[a-zA-Z]", "".join(tree.itertext())), latex


def verify(id, slow):
    claim = CLAIMS[id]
    result = examine(id, Plan(slow=slow))
    finding = result["finding"]
    assert finding.verdict is Verdict.PASS, finding.why
    parts = finding.evidence["parts"]
    names = [part["id"] for part in parts]
    assert len(names) == len(set(names)), "two pieces of evidence share a name"
    assert all(part["why"] for part in parts)
    assert {e.id for e in claim.errata} <= set(names)
    kinds = {part["evidence"]["kind"] for part in parts} - {"erratum"}
    assert kinds == {str(kind) for kind in claim.kinds}
    control = examine(id, Plan(slow=slow, broken=True))
    assert not control["crashed"], control["finding"].why
    assert control["finding"].verdict is Verdict.FAIL, f"the control did not make it fail: {claim.control}"


LONGEST = {
    "kv-cache-exact", "kv-cache-cost", "prenorm-vs-postnorm", "unit-variance-scaling", "train-nano-gpt",
    "generation-bug-triage", "rank-collapse-depth", "induction-head-circuit", "permutation-equivariance",
    "gpt2-logits-match",
}  # fmt: skip
"""Together most of the time of all; the tests of engine, lens and weights look at the same things."""


@pytest.mark.sample(12)
@pytest.mark.parametrize("id", [pytest.param(id, marks=[pytest.mark.slow] * (id in LONGEST)) for id in QUICK])
def test_the_claim_passes_and_its_control_fails(id):
    verify(id, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("id", SLOW)
def test_the_slow_claim_passes_and_its_control_fails(id):
    verify(id, slow=True)


@pytest.mark.slow
@pytest.mark.parametrize("id", QUICK)
def test_the_slow_parts_of_a_quick_claim_pass_too(id):
    finding = examine(id, Plan(slow=False))["finding"]
    if any(part["verdict"] == Verdict.SKIP for part in finding.evidence["parts"]):
        verify(id, slow=True)


def test_which_claims_have_a_figure():
    assert {id for id, claim in CLAIMS.items() if not claim.has_figure and id in IDS} == WITHOUT_FIGURE


def in_default_suite(id):
    """One figure a chapter; all of them in `make test-all`, for the drawing takes longer than most proofs."""
    chapter = [other for other, claim in CLAIMS.items() if claim.chapter == CLAIMS[id].chapter]
    return id in chapter[:1]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "id", [id if in_default_suite(id) else pytest.param(id, marks=pytest.mark.slow) for id in CLAIMS]
)
def test_the_figure_draws(id):
    claim = CLAIMS[id]
    if not claim.has_figure:
        with pytest.raises(gf.claims.ClaimError, match="has no figure"):
            draw(id)
        return
    root = ElementTree.fromstring(draw(id).svg())
    assert root.tag.endswith("svg")
    assert sum(1 for element in root.iter() if element.tag.endswith("text")) >= 3
