"""`gf.encode`: the states of each text alone, by the kernels and by torch, and what is refused."""

import dataclasses
import random

import pytest
import torch

import glassformer as gf
from glassformer import config as c
from glassformer.errors import GlassformerError
from glassformer.generation import encoding
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
def test_each_text_gets_what_it_gets_alone(engine, monkeypatch):
    monkeypatch.delenv("GLASSFORMER_NATIVE", raising=False)
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
    exact = gf.encode(model, TEXTS, engine="native")
    for precision in ("bfloat16", "int8"):
        near = gf.encode(model, TEXTS, precision=precision)
        apart = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(near, exact, strict=True))
        assert 0 < apart < 0.2
    with pytest.raises(GlassformerError, match="needs the compiled kernels"):
        gf.encode(model, TEXTS, engine="torch", precision="int8")


@pytest.fixture
def graphs(monkeypatch):
    """Serve calls on a CPU as a GPU would: by captured graphs, which are recorded here."""
    kernels = pytest.importorskip("glassformer.kernels.encode")
    from tests.kernels.cuda.graph import recorded

    recorded.record(monkeypatch)
    monkeypatch.delenv("GLASSFORMER_NATIVE", raising=False)
    kernel = dataclasses.replace(kernels.ENCODE_KERNELS[-1], device="cpu")

    def capturing(model, modules, precision):
        made = kernels.graph_encoder(model, modules)
        made.captures, made.side = True, recorded.Stream()
        return made

    monkeypatch.setattr(kernels, "ENCODE_KERNELS", (dataclasses.replace(kernel, make=capturing),))
    return recorded.Graph


def test_many_texts_come_back_in_order_from_few_sizes_of_batches(graphs, monkeypatch):
    """By graphs and by torch, with segments; each call gives what the first one gave."""
    monkeypatch.setattr(encoding, "BATCH", 96)
    model, draw = encoder().train(), random.Random(0)
    texts = [[draw.randrange(31) for _ in range(draw.randint(1, 16))] for _ in range(50)]
    kinds = [[draw.randrange(2) for _ in text] for text in texts]
    found = [gf.encode(model, texts, kinds, engine=engine) for engine in ("native", "native", "auto", "torch")]
    assert model.training
    assert graphs.made
    assert sum(graph.replays for graph in graphs.made) > 10
    model.eval()
    for i, (text, kind) in enumerate(zip(texts, kinds, strict=True)):
        with torch.no_grad():
            wanted = model.encode(torch.tensor([text]), segments=torch.tensor([kind]))[0]
        for states in found:
            assert states[i].shape == wanted.shape
            assert float((states[i] - wanted).abs().max() / wanted.abs().max()) < 3e-5


def test_batches_have_similar_lengths_and_bounded_sizes():
    draw = random.Random(1)
    lengths = [draw.randint(1, 512) for _ in range(3000)]

    def padded(rows, length):
        return -(-rows // 8) * 8, -(-length // 16) * 16

    for shape in (None, padded):
        found = encoding.batches(lengths, shape)
        assert sorted(i for batch in found for i in batch) == list(range(3000))
        for batch in found:
            assert batch == sorted(batch)
            longest = max(lengths[i] for i in batch)
            rows, length = (len(batch), longest) if shape is None else shape(len(batch), longest)
            assert rows * length <= encoding.BATCH
            assert sum(longest - lengths[i] for i in batch) <= encoding.PADDING
        # full, but for texts that would be padded too much
        assert len(found) < 1.3 * sum(lengths) / encoding.BATCH + 10
    assert encoding.batches([5, 3, 70000, 3, 9]) == [[2], [0, 1, 3, 4]]
    assert encoding.batches([16, 128, 80, 31]) == [[0, 1, 2, 3]]  # a short list is one batch, as it was given


def test_what_graphs_do_not_support_is_computed_by_torch_unless_they_were_named(graphs):
    experts = encoder(feedforward=c.MoE(4, 2, expert=c.Dense(32)))
    assert len(gf.encode(experts, TEXTS)) == 3
    with pytest.raises(GlassformerError, match="cannot wait for the experts that a router chooses: use engine='torch'"):
        gf.encode(experts, TEXTS, engine="native")
    model = encoder()
    with pytest.raises(GlassformerError, match="in the stored dtype, float32, and not in bfloat16: use engine='torch'"):
        gf.encode(model, TEXTS, engine="native", precision="bfloat16")
    exact = gf.encode(model, TEXTS, engine="torch")
    for engine in ("auto", "torch"):  # autocast
        near = gf.encode(model, TEXTS, engine=engine, precision="bfloat16")
        assert 0 < max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(near, exact, strict=True)) < 0.2
    with pytest.raises(GlassformerError, match="and not in fp8: use precision='auto'"):
        gf.encode(model, TEXTS, precision="fp8")


def test_a_precision_of_torch_is_the_one_that_was_asked_for():
    model = encoder().bfloat16()
    assert {one.dtype for one in gf.encode(model, TEXTS, engine="torch")} == {torch.bfloat16}
    assert {one.dtype for one in gf.encode(model, TEXTS, engine="torch", precision="float32")} == {torch.float32}
    assert model.dtype is torch.bfloat16


def test_the_environment_disables_kernels_for_auto_only(graphs, monkeypatch):
    model = encoder()
    wanted = gf.encode(model, TEXTS, engine="torch")
    for value, engine, uses_graphs in (("0", "auto", False), ("0", "native", True), ("1", "auto", True)):
        monkeypatch.setenv("GLASSFORMER_NATIVE", value)
        made = len(graphs.made)
        for _ in range(3):  # the second time a size occurs it is captured
            found = gf.encode(model, TEXTS, engine=engine)
            assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, wanted, strict=True))
        assert (len(graphs.made) > made) is uses_graphs
        model = encoder()  # graphs belong to a model
    monkeypatch.setenv("GLASSFORMER_NATIVE", "0")
    with pytest.raises(GlassformerError, match="and not in int8"):
        gf.encode(model, TEXTS, precision="int8")  # which torch does not have


@needs_compiler
def test_torch_does_not_compete_with_the_threads_of_the_kernels():
    model, threads = encoder(), []
    model.embed.register_forward_hook(lambda *_: threads.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        gf.encode(model, TEXTS, engine="native")
        assert threads == [1]
        assert torch.get_num_threads() == 2
        gf.encode(model, TEXTS, engine="torch")
        assert threads == [1, 2]
    finally:
        torch.set_num_threads(before)


@needs_compiler
def test_a_model_without_kernels_is_computed_by_torch_unless_they_were_named(monkeypatch):
    monkeypatch.delenv("GLASSFORMER_NATIVE", raising=False)
    model = encoder(position=c.QueryKeyPosition())
    assert len(gf.encode(model, TEXTS)) == 3
    with pytest.raises(GlassformerError, match="use engine='torch'"):
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
    with pytest.raises(ValueError, match=r"segment id 2 is outside the segments of 2 \(0 to 1\)"):
        gf.encode(encoder(), [[1, 2]], [[0, 2]])
    with pytest.raises(ValueError, match="a model without segment embeddings"):
        gf.encode(encoder(embedding=c.Embedding()), [[1]], [[0]])
    with pytest.raises(ValueError, match="engine='cuda' is not known: use 'auto', 'torch', 'native'"):
        gf.encode(encoder(), TEXTS, engine="cuda")
    with pytest.raises(ValueError, match="is not an encoder"):
        gf.encode(gf.build(decoder()), TEXTS)
