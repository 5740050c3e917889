"""Generation through the kernels: the tokens of the engine, for ragged prompts, beams and samplers alike."""

import pytest
import torch

from glassformer.config import presets
from glassformer.generation import Sampling, generate
from glassformer.kernels.cpu.decode import NativeDecoder
from glassformer.kernels.toolchain import cxx
from glassformer.model import build
from tests.generation.test_speculate import LIVELY, near, untied
from tests.variants import decoder, lively

pytestmark = pytest.mark.skipif(cxx.compiler() is None, reason="no C++ compiler here")
RAGGED = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7], [9, 3]]


@pytest.mark.parametrize("beams", [1, 3])
def test_the_same_tokens_as_the_engine(beams):
    model = lively(decoder(max_len=64), std=0.5)[0].float()
    samplers = [None] if beams > 1 else [None, Sampling(temperature=1.2, top_k=20), Sampling(repetition_penalty=1.3)]
    for sampling in samplers:
        arguments = {"max_new_tokens": 30, "sampling": sampling, "beams": beams, "seed": 3}
        wanted = generate(model, RAGGED, engine="torch", **arguments)
        assert generate(model, RAGGED, engine="native", **arguments) == wanted
        assert generate(model, RAGGED, engine="native", prefill_chunk=2, **arguments) == wanted


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_lower_precisions_stay_near_in_distribution(precision):
    """Kullback-Leibler divergence of the next token from float32's, on the bundled model and its own text."""
    import glassformer as gf

    model = gf.load("bard", dtype="float32")
    text = torch.randint(0, 65, (4, 40), generator=torch.Generator().manual_seed(0)).tolist()
    wanted, found = (NativeDecoder(model, 4, 48, p) for p in ("float32", precision))
    with torch.no_grad():
        wanted.read(text), found.read(text)
        p, q = (one.step(torch.tensor([1, 2, 3, 4])).log_softmax(-1) for one in (wanted, found))
    divergence = float((p.exp() * (p - q)).sum(-1).mean())
    assert 0 < divergence < {"bfloat16": 1e-3, "int8": 1e-2}[precision]


def test_the_model_is_left_as_it_was():
    model = build(presets.nano(max_len=32)).train()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    generate(model, [[1, 2, 3]], 5, engine="native", precision="int8")
    assert model.training
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("who", ["near", "lookup"])
def test_drafts_give_what_torch_gives(who):
    model = lively(untied(), std=0.5)[0]
    draft = near(model, 0.3).float() if who == "near" else "lookup"
    model = model.float()
    for sampling, chunk in ((None, None), (LIVELY, 2), (Sampling(repetition_penalty=1.3), 6)):
        given = {"sampling": sampling, "seed": 3, "draft": draft, "draft_tokens": 3}
        wanted = generate(model, RAGGED, 20, engine="torch", **given)
        found = generate(model, RAGGED, 20, engine="native", prefill_chunk=chunk, **given)
        assert found == wanted
        assert found.acceptance == wanted.acceptance
    for precision in ("float32", "int8"):
        by = {"engine": "native", "precision": precision}
        assert generate(model, RAGGED, 20, **by, draft=draft) == generate(model, RAGGED, 20, **by)
