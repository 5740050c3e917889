"""`gf.encode`: the states of each text alone, by the kernels and by torch, and what is refused."""

import pytest
import torch

import glassformer as gf
from glassformer import config as c
from glassformer.errors import GlassformerError
from tests.cli.asking import has_compiler
from tests.variants import decoder, lively

needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler here")
TEXTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7]]


def encoder(**changes):
    base = c.EncoderConfig(
        vocab_size=31, d_model=64, n_layers=2, attention=c.Attention(4), feedforward=c.Dense(64), max_len=16,
        embedding=c.Embedding(n_segments=2),
    )  # fmt: skip
    return lively(c.replace(base, **changes))[0].float()


@pytest.mark.parametrize("engine", ["torch", pytest.param("native", marks=needs_compiler), "auto"])
def test_each_text_gets_what_it_gets_alone(engine):
    model = encoder().train()
    kinds = [[i % 2 for i in range(len(text))] for text in TEXTS]
    found = gf.encode(model, TEXTS, kinds, engine=engine)
    assert model.training
    for text, kind, states in zip(TEXTS, kinds, found, strict=True):
        with torch.no_grad():
            wanted = model.eval().encode(torch.tensor([text]), segments=torch.tensor([kind]))[0]
        assert states.shape == wanted.shape
        assert float((states - wanted).abs().max() / wanted.abs().max()) < 3e-5


@needs_compiler
def test_lower_precisions_are_near_and_need_the_kernels():
    model = encoder()
    exact = gf.encode(model, TEXTS)
    for precision in ("bfloat16", "int8"):
        near = gf.encode(model, TEXTS, precision=precision)
        apart = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(near, exact, strict=True))
        assert 0 < apart < 0.2
    with pytest.raises(GlassformerError, match="needs the compiled kernels"):
        gf.encode(model, TEXTS, engine="torch", precision="int8")


@needs_compiler
def test_a_model_without_kernels_is_computed_by_torch_unless_they_were_named():
    model = encoder(position=c.QueryKeyPosition())
    assert len(gf.encode(model, TEXTS)) == 3
    with pytest.raises(GlassformerError, match="or use engine='torch'"):
        gf.encode(model, TEXTS, engine="native")


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [
        ([], "no text"),
        ([[1], []], "an empty one"),
        ([[31]], "outside the vocabulary of 31"),
        ([[1] * 17], "has 17 tokens and the model has positions for 16"),
        ("text", "no tokenizer"),
    ],
)
def test_what_cannot_be_encoded_is_one_sentence(texts, sentence):
    with pytest.raises(ValueError, match=sentence):
        gf.encode(encoder(), texts)


def test_segments_must_fit_and_decoders_are_refused():
    with pytest.raises(ValueError, match="one id for each token"):
        gf.encode(encoder(), TEXTS, [[0]])
    with pytest.raises(ValueError, match="is not an encoder"):
        gf.encode(gf.build(decoder()), TEXTS)
