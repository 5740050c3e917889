"""Captured encoders, with recorded graphs on a CPU: padding, buffers, what is kept, and what cannot be captured."""

import copy
import gc
import random
import threading
import weakref

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import glassformer as gf
from glassformer import config as c
from glassformer.errors import GlassformerError
from glassformer.generation import encoding
from glassformer.generation.engine import Call
from glassformer.kernels.cuda.graph import captured_encoder
from glassformer.kernels.cuda.graph.captured_encoder import Shape, graph_encoder, padded_shape
from glassformer.kernels.encode import supported_by_graph
from glassformer.model.transformer import modules_of
from tests import variants
from tests.kernels.cuda.graph.recorded import Graph, Stream, record
from tests.sampled import examples
from tests.variants import lively

V = 31


@pytest.fixture
def recorded(monkeypatch):
    record(monkeypatch)


def encoder_model(**changes):
    base = c.EncoderConfig(
        vocab_size=V, d_model=24, n_layers=2, attention=c.Attention(3), feedforward=c.Dense(48), max_len=40,
        embedding=c.Embedding(n_segments=2),
    )  # fmt: skip
    return lively(c.replace(base, **changes))[0]


def encoder_of(model):
    made = graph_encoder(model, modules_of(model.embed, model.encoder))
    if made.side is None:  # captured, though on a CPU
        made.captures, made.side = True, Stream()
    return made


def drawn(lengths, seed, vocab=V):
    draw = random.Random(seed)
    return [[draw.randrange(vocab) for _ in range(length)] for length in lengths]


def alone(model, texts, segments=None):
    kinds = [None] * len(texts) if segments is None else [torch.tensor([one]) for one in segments]
    with torch.no_grad():
        return [model.encode(torch.tensor([text]), segments=kind)[0] for text, kind in zip(texts, kinds, strict=True)]


def apart(found, wanted) -> float:
    assert [one.shape for one in found] == [one.shape for one in wanted]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True))


@pytest.mark.usefixtures("recorded")
@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=variants.encoders)
def test_a_graph_computes_every_supported_variant_and_each_text_gets_what_it_gets_alone(config):
    """Two batches of one size without a graph and two with it; the texts differ in number and lengths."""
    has_experts = any(isinstance(config.layer_feedforward(layer), c.MoE) for layer in range(config.n_layers))
    reason = supported_by_graph(Call(config, torch.float64, torch.device("cuda"), precision="float64"))
    assert (reason is not None) == (has_experts or config.changes_frequencies_at is not None)
    if reason is not None:
        return
    model = lively(config)[0]
    encoder, n_segments = encoder_of(model), config.embedding.n_segments
    for seed in range(4):
        lengths = [13, 1, 7, 20, 29, *[4] * 11, *[2, 9][seed % 2 :]]  # 18 rows of 29 or 32 tokens
        texts = drawn(lengths, seed)
        segments = drawn(lengths, seed + 9, n_segments) if n_segments else None
        assert apart(encoder.encode(texts, segments), alone(model, texts, segments)) < 1e-9
    assert encoder.failure is None
    ((shape, graph),) = encoder.graphs.items()
    assert shape == Shape(18, padded_shape(1, 29, model.encoder.max_position)[1], True, bool(n_segments))
    assert graph.replays == 2


def test_rows_and_lengths_are_rounded_up_to_a_few_sizes():
    assert [padded_shape(1, n, None)[1] for n in (1, 16, 17, 128, 200, 257, 512)] == [16, 16, 32, 128, 208, 288, 512]
    assert [padded_shape(n, 1, None)[0] for n in (1, 2, 15, 16, 17, 32, 33, 100)] == [1, 2, 15, 16, 18, 32, 36, 104]
    for n in range(1, 3000):
        rows, length = padded_shape(n, n, None)
        assert n <= rows <= max(n * 1.125, n + 0)
        assert n <= length <= max(n * 1.125, n + 15)
    assert len({padded_shape(1, n, None)[1] for n in range(1, 513)}) == 24
    assert captured_encoder.CAPTURED >= encoding.BATCH
    assert padded_shape(1, 500, 505) == (1, 505)  # a learned table has no more positions
    assert padded_shape(1, 600, 505) == (1, 640)


@pytest.mark.usefixtures("recorded")
def test_nothing_of_an_earlier_batch_is_left():
    """Its tokens, its segments, its lengths and its rows; a NaN would reach every text whose mask let it."""
    model = encoder_model()
    with torch.no_grad():
        model.embed.tokens.weight[5] = float("nan")
        model.embed.segments.weight[1] = float("nan")
    encoder = encoder_of(model)
    poison = [[5] * 20] * 4
    first, last = [[1, 2, 3], [4, 6] * 9, [7]], [[8], [9, 1] * 9, [2, 4]]
    for texts in (first, last):
        encoder.encode(poison, [[1] * 20] * 4)
        encoder.encode([*texts, texts[0]], [[0] * len(text) for text in [*texts, texts[0]]])
    encoder.encode(poison, [[1] * 20] * 4)
    full = [*last, [3] * 18]
    zeros = [[0] * len(text) for text in full]
    found, again = encoder.encode(full, zeros), encoder.encode(full[::-1], zeros)[::-1]
    assert Graph.made[0].replays > 2
    wanted = alone(model, full, zeros)
    assert apart(found, wanted) < 1e-9 > apart(again, wanted)


@pytest.mark.usefixtures("recorded")
def test_results_are_no_buffers_and_full_rows_have_no_mask(monkeypatch):
    model = encoder_model()
    encoder = encoder_of(model)
    batches = [drawn([16] * 17, seed) for seed in range(5)]  # a row more pads the batch
    masks = []
    forward = type(model.encoder).forward
    monkeypatch.setattr(
        type(model.encoder), "forward", lambda stack, x, *rest: (masks.append(rest), forward(stack, x, *rest))[1]
    )
    found = [encoder.encode(texts) for texts in batches]
    assert masks == [()] * 3  # once for each of the first two, and once for the capture
    for states, texts in zip(found, batches, strict=True):
        assert apart(states, alone(model, texts)) < 1e-9
    assert list(encoder.graphs) == [Shape(18, 16, False, False)]


@pytest.mark.usefixtures("recorded")
def test_the_oldest_graph_is_forgotten_and_memory_is_that_of_one_that_still_exists(monkeypatch):
    monkeypatch.setattr(captured_encoder, "MOST_GRAPHS", 3)
    encoder = encoder_of(encoder_model())
    for rows in (1, 1, 2, 2, 3, 3):
        encoder.encode([[1, 2]] * rows)
    assert [graph.given_pool for graph in Graph.made] == [None, Graph.made[0], Graph.made[0]]
    encoder.encode([[1, 2]])  # used again, so two rows are the oldest
    encoder.encode([[1, 2]] * 4)
    assert [shape.rows for shape in encoder.graphs] == [3, 1, 4]
    assert encoder.graphs[Shape(4, 16, True, False)] is None
    used = Graph.made[1:]
    del encoder.graphs[Shape(1, 16, True, False)]
    encoder.encode([[1, 2]] * 4)
    assert Graph.made[-1].given_pool is used[1].pool()


@pytest.mark.usefixtures("recorded")
def test_weights_are_read_in_place_until_they_move():
    model = encoder_model()
    texts = drawn([5, 9], 0)
    encoder = encoder_of(model)
    for _ in range(3):
        encoder.encode(texts)
    with torch.no_grad():
        model.encoder.blocks[1].attention.k.weight.mul_(-2)
    assert encoder_of(model) is encoder
    assert apart(encoder.encode(texts), alone(model, texts)) < 1e-9
    part = model.encoder.blocks[0].norm_attention
    part.weight = torch.nn.Parameter(part.weight.detach() * 3)
    moved = encoder_of(model)
    assert moved is not encoder
    assert apart(moved.encode(texts), alone(model, texts)) < 1e-9


@pytest.mark.usefixtures("recorded")
def test_graphs_do_not_keep_a_model_alive():
    model = encoder_model()
    for _ in range(3):
        encoder_of(model).encode(drawn([5, 9], 0))
    watched = weakref.ref(model)
    del model
    gc.collect()
    assert watched() is None


@pytest.mark.usefixtures("recorded")
def test_threads_take_turns_and_a_batch_on_another_stream_waits_for_the_last_one():
    model = encoder_model()
    encoder, failures = encoder_of(model), []

    def work(seed):
        for step in range(8):
            texts = drawn([seed + 1, 16, 3], 10 * seed + step)
            if apart(encoder.encode(texts), alone(model, texts)) > 1e-9:
                failures.append((seed, step))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    other = Stream("other")
    with other.computes():
        encoder.encode([[1]])
        encoder.encode([[1]] * 2)
    assert other.waits == ["main"]


@pytest.mark.usefixtures("recorded")
def test_a_model_that_waits_is_computed_without_graphs_and_native_says_why():
    """A module that a user has replaced. An encoder with hooks is refused: a graph would not call them."""
    model = encoder_model()
    activation = model.encoder.blocks[0].feedforward.activation

    def waiting(x):
        assert float(x.abs().max()) < 1e9
        return activation(x)

    model.encoder.blocks[0].feedforward.activation = waiting
    encoder, texts = encoder_of(model), drawn([5, 9], 0)
    for _ in range(3):
        assert apart(encoder.encode(texts), alone(model, texts)) < 1e-9
    assert len(Graph.made) == 1
    with pytest.raises(GlassformerError, match=r"could not be captured .*_local_scalar_dense\): use engine='torch'"):
        encoder_of(model)
    hooked = encoder_model()
    hooked.encoder.blocks[0].register_forward_hook(lambda *given: None)
    with pytest.raises(GlassformerError, match="would not call the forward hooks"):
        encoder_of(hooked)


@pytest.mark.usefixtures("recorded")
def test_a_graph_is_not_kept_if_another_thread_switched_dropout_on():
    model = encoder_model()
    encoder, texts = encoder_of(model), drawn([5, 9], 0)
    encoder.encode(texts)
    model.encoder.blocks[0].dropout.train()
    encoder.encode(texts)
    assert list(encoder.graphs.values()) == [None]
    model.eval()
    for _ in range(2):
        encoder.encode(texts)
    assert [graph.replays for graph in encoder.graphs.values()] == [1]


@pytest.mark.usefixtures("recorded")
def test_a_text_longer_than_the_buffers_and_calls_in_inference_mode(monkeypatch):
    monkeypatch.setattr(captured_encoder, "CAPTURED", 32)
    model = encoder_model()
    with torch.inference_mode():
        encoder = encoder_of(model)
        for _ in range(2):
            encoder.encode([[1, 2, 3]])
    texts = drawn([37], 0)
    for _ in range(3):
        assert apart(encoder.encode(texts), alone(model, texts)) < 1e-9
    assert apart(encoder.encode([[1, 2]]), alone(model, [[1, 2]])) < 1e-9
    assert [shape.tokens for shape in encoder.graphs] == [16]
    assert Graph.made[0].replays == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize(
    ("dtype", "position"), [(torch.float32, c.Rotary()), (torch.float32, c.Alibi()), (torch.bfloat16, c.Learned())]
)
def test_captured_batches_equal_padded_ones_on_a_gpu(dtype, position):
    cfg = c.EncoderConfig(
        vocab_size=101, d_model=128, n_layers=3, attention=c.Attention(4, window=30, window_layers=(1,)),
        feedforward=c.Dense(256), max_len=100, position=position, embedding=c.Embedding(n_segments=2),
    )  # fmt: skip
    model = gf.build(cfg, seed=0, device="cuda", dtype=dtype)
    exact = copy.deepcopy(model).double()
    bound = 1e-5 if dtype is torch.float32 else 3e-2
    kept = []
    for seed in range(5):
        lengths = [100, 3, 57, 99, 1, *[20] * 12, 8 + seed]
        texts, segments = drawn(lengths, seed, 101), drawn(lengths, seed + 9, 2)
        kept.append((gf.encode(model, texts, segments, engine="native"), gf.encode(exact, texts, segments, "torch")))
    for found, wanted in kept:
        assert apart([one.double() for one in found], wanted) < bound
    encoder = graph_encoder(model, modules_of(model.embed, model.encoder))
    assert encoder.failure is None
    assert any(graph is not None for graph in encoder.graphs.values())
