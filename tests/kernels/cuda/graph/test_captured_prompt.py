"""Captured prompts, emulated on a CPU: padding, streams, one matmul for queries, keys and values, shared memory."""

import contextlib
import random
from types import SimpleNamespace

import pytest
import torch

from glassformer import config as c
from glassformer.kernels.cuda.graph import captured_prompt, prompt
from glassformer.kernels.cuda.graph.launches import Launch
from glassformer.model import build
from tests.emulated_cuda import needs_compiler
from tests.kernels.cuda.graph.emulated import on_cpu  # noqa: F401
from tests.kernels.cuda.graph.test_fused import VARIANTS, V, config
from tests.kernels.cuda.graph.test_prompt import BOUND, T, difference, models, read, reader_of, worst

pytestmark = [needs_compiler, pytest.mark.usefixtures("on_cpu")]


@pytest.fixture
def joined(monkeypatch):
    """Short prompts have one matmul for queries, keys and values, too."""
    monkeypatch.setattr(prompt, "JOINED", 1)


def test_a_prompt_after_a_longer_one_of_the_same_padded_length():
    exact, half = models(config(), torch.float16)
    reader = reader_of(half)
    ids = torch.randint(0, V, (2, T + 2), generator=torch.Generator().manual_seed(6))
    read(half, ids, reader=reader, chunk=T + 2)
    wanted, kept = read(exact, ids[:, :T])
    found, stored = read(half, ids[:, :T], reader=reader)
    assert list(reader.prompts) == [(2, 64)]
    assert difference(found, wanted) < 1e-2
    assert max(difference(a, b) for x, y in zip(stored, kept, strict=True) for a, b in zip(x, y, strict=True)) < 1e-2
    assert all(store.shape[2] == T for pair in stored for store in pair)


def test_a_prompt_does_not_depend_on_the_one_before():
    """Not even if that one had a NaN where the next one has padding, or if the memory of the cache had."""
    _, half = models(config(), torch.float16)
    with torch.no_grad():
        half.embed.tokens.weight[5] = float("nan")
    reader = reader_of(half)
    ids = torch.tensor([[1, 2, 3, 4]])
    wanted, _ = read(half, ids, reader=reader)
    assert read(half, torch.tensor([[1, 5, 5, 5, 5, 5, 5]]), reader=reader)[0].isnan().all()
    found, stored = read(half, ids, reader=reader)
    assert torch.equal(found, wanted)
    assert not any(held.isnan().any() for pair in stored for held in pair)


class Stream:
    """In place of a CUDA stream: it notes what is launched on it and which other streams it waits for."""

    now: "Stream"
    noted: list[tuple[str, str]]

    def __init__(self, name: str):
        self.name = name

    def wait_stream(self, other: "Stream") -> None:
        self.noted.append((self.name, f"waits for {other.name}"))

    @contextlib.contextmanager
    def computes(self):
        before, Stream.now = Stream.now, self
        yield
        Stream.now = before


def launched(monkeypatch, n_layers: int) -> list[tuple[str, str]]:
    """Return what a captured prompt launches and waits for, with its stream, after checking the hidden state."""
    exact, half = models(config(n_layers=n_layers), torch.float16)
    ids = torch.randint(0, V, (1, T), generator=torch.Generator().manual_seed(8))
    wanted = read(exact, ids)[0]
    reader = reader_of(half)
    reader.streams = [Stream(name) for name in ("whole", "keys", "values")]
    Stream.now, Stream.noted = Stream("main"), []
    names = {getattr(b.attention, n).weight.data_ptr(): n for b in half.decoder.blocks for n in "qkv"}

    def note(holder, name, called):
        original = getattr(holder, name)

        def noted(*given, **options):
            what = called(*given, **options)
            if what is not None:
                Stream.noted.append((Stream.now.name, what))
            return original(*given, **options)

        monkeypatch.setattr(holder, name, noted)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream.now)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream.computes())
    note(Launch, "run", lambda launch: launch.kernel)
    for block in half.decoder.blocks:
        note(block.attention, "kernel", lambda *given, **options: "attends")
    note(torch, "cat", lambda parts, out=None: None if out is None else "copies weights")
    rows = (4 + 2 + 2) * 16  # of queries, keys and values; no other matrix has as many
    note(
        prompt.F, "linear",
        lambda x, weight, bias=None: "all three" if len(weight) == rows else names.get(weight.data_ptr()),
    )  # fmt: skip
    assert difference(read(half, ids, reader=reader)[0], wanted) < 1e-2
    assert not reader.sides  # a longer prompt is launched on one stream
    assert not reader.joint
    return Stream.noted


REST = [("main", "prepare_heads"), ("main", "attends"), ("main", "normalize"), ("main", "apply_gate")]


def test_keys_and_values_on_streams_of_their_own(monkeypatch):
    """They begin when the norm is launched, queries do not wait for them, and what follows waits for both."""
    assert launched(monkeypatch, 1) == [
        ("main", "normalize"),
        ("keys", "waits for main"), ("keys", "k"), ("values", "waits for main"), ("values", "v"), ("main", "q"),
        ("main", "waits for keys"), ("main", "waits for values"), *REST,
    ]  # fmt: skip


def test_weights_are_copied_while_the_layer_before_is_computed(monkeypatch, joined):
    """Each copy is after the matmul that read what it overwrites; the first two graphs begin with one."""
    copied = [("keys", "waits for main"), *[("keys", "copies weights")] * 2]  # the biases, too
    matmul = [("main", "normalize"), ("main", "waits for keys"), ("main", "all three")]
    second = [*copied, *matmul, *copied, *REST]
    assert launched(monkeypatch, 3) == [*copied, *matmul, *REST, *second, *matmul, *REST]


class Graph:
    """In place of a CUDA graph: it notes where its capture begins and ends."""

    def __init__(self):
        Graph.made.append(self)

    def capture_begin(self, pool, capture_error_mode):
        Stream.noted.append((Stream.now.name, f"graph {Graph.made.index(self)} with pool {pool}"))

    def capture_end(self):
        Stream.noted.append((Stream.now.name, "end"))

    def pool(self):
        return Graph.made.index(self)

    def replay(self):
        Stream.noted.append((Stream.now.name, f"replays {Graph.made.index(self)}"))


def test_the_first_layer_is_a_graph_of_its_own(monkeypatch):
    """The launch of the rest takes longer, and the first layer is computed meanwhile. Both use the same memory, and all
    streams are joined at the end of each: otherwise CUDA refuses to end the capture.
    """
    Graph.made = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    half = models(config(n_layers=3), torch.float16)[1]
    reader = reader_of(half)
    reader.streams = [Stream(name) for name in ("whole", "keys", "values")]
    Stream.now, Stream.noted = Stream("main"), []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream.now)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream.computes())
    ids = torch.randint(0, V, (1, T), generator=torch.Generator().manual_seed(8))
    wanted = read(half, ids, reader=reader)[0]
    ((_, captured),) = reader.prompts.items()
    Stream.noted.clear()
    with torch.no_grad():
        captured._capture(reader)
    layer = ["keys waits for whole", "values waits for whole", "whole waits for keys", "whole waits for values"]
    assert [f"{stream} {what}" for stream, what in Stream.noted] == [
        "whole waits for main",
        "whole graph 0 with pool None", *layer, "whole end",
        "whole graph 1 with pool 0", *layer, *layer, "whole end",
        "main waits for whole",
    ]  # fmt: skip
    Stream.noted.clear()
    assert torch.equal(read(half, ids, reader=reader)[0], wanted)
    assert Stream.noted == [("main", "replays 0"), ("main", "replays 1")]


def test_a_model_of_one_layer_is_one_graph():
    reader = reader_of(models(config(n_layers=1), torch.float16)[1])
    assert captured_prompt.CapturedPrompt(reader, 1, 64).parts == [range(1)]


def test_one_matmul_for_queries_keys_and_values(joined):
    assert worst(config()) < BOUND


def test_biases_and_norms_over_all_heads_with_one_matmul(joined):
    assert (
        worst(config(attention=c.Attention(4, 2, d_head=16, bias=True, qk_norm=c.RMSNorm(), qk_norm_over="all")))
        < BOUND
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_every_part_with_one_matmul(name, joined):
    assert worst(config(**VARIANTS[name])) < BOUND


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_generated_attention_with_one_matmul_and_three(seed, monkeypatch):
    """Combinations of options that nobody chose."""
    cfg = generated(random.Random(seed))
    assert worst(cfg, batch=2) < BOUND
    monkeypatch.setattr(prompt, "JOINED", 1)
    assert worst(cfg, batch=2) < BOUND


def generated(draw: random.Random) -> c.DecoderConfig:
    heads, shared, d_head = draw.choice([1, 2, 4]), draw.choice([1, 2, 3]), draw.choice([16, 24, 32, 64])
    norm = draw.choice([None, c.RMSNorm(), c.RMSNorm(offset=1.0), c.RMSNorm(weight=False), c.LayerNorm()])
    over = draw.choice(["head", "heads", "all"] if isinstance(norm, c.RMSNorm) and norm.weight else ["head", "all"])
    attention = c.Attention(
        heads * shared, heads, d_head=d_head, d_value=draw.choice([None, 16, 40]), bias=draw.random() < 0.5,
        qk_norm=norm, qk_norm_over="head" if norm is None else over,
        qk_norm_after_rotation=norm is not None and over != "all" and draw.random() < 0.3,
        clip=draw.choice([None, 0.7]), window=draw.choice([None, 3]), softcap=draw.choice([None, None, 0.9]),
        sinks=draw.random() < 0.2,
    )  # fmt: skip
    position = draw.choice([
        c.Rotary(), c.Rotary(pairing="interleaved"), c.Rotary(fraction=0.5), c.Alibi(), c.NoPosition(),
    ])  # fmt: skip
    return config(attention=attention, position=position)


def test_which_prompts_have_one_matmul():
    def joins(tokens, **changes):
        return prompt.joins_projections(config(**changes), tokens)

    narrow, wide = c.Attention(32, 8, d_head=64), c.Attention(32, 32, d_head=64)
    assert [joins(n, attention=narrow) for n in (512, 1024, 2048)] == [False, True, True]
    assert [joins(n, attention=wide) for n in (512, 1024, 2048)] == [False, False, False]


def test_a_matmul_with_weights_that_changed(joined):
    """They are copied for each prompt, so a prompt after a step of training reads the new ones."""
    exact, half = models(config(), torch.float16)
    ids = torch.randint(0, V, (1, T), generator=torch.Generator().manual_seed(8))
    reader = reader_of(half)
    before = read(half, ids, reader=reader)[0]
    with torch.no_grad():
        for model in (exact, half):
            model.decoder.blocks[1].attention.k.weight.mul_(-2.0)
    assert reader_of(half) is reader
    found, wanted = read(half, ids, reader=reader)[0], read(exact, ids)[0]
    assert difference(found, wanted) < 1e-2 < difference(before, wanted)


def test_which_prompts_are_padded():
    def padded(n, most=None, changes_at=None):
        return captured_prompt.padded_length(n, most, changes_at)

    assert [padded(n) for n in (1, 64, 65, 1000, 1025, 2048)] == [64, 64, 128, 1024, 1152, 2048]
    assert all(n <= padded(n) <= max(n + 63, n * 1.125) for n in range(1, 5000))
    assert padded(30, most=40) == 40  # a learned table has no more positions
    assert [padded(n, changes_at=100) for n in (90, 100, 101)] == [100, 100, 128]


def test_a_mixture_of_experts_is_not_captured():
    def reader(**changes):
        return reader_of(build(config(**changes), seed=0).half())

    assert reader().is_capturable
    assert not reader(feedforward=c.MoE(4, 2, expert=c.Gated(64))).is_capturable


def test_the_oldest_captured_prompt_is_forgotten(monkeypatch):
    monkeypatch.setattr(prompt, "MOST_GRAPHS", 2)
    _, half = models(config(), torch.float16)
    reader = reader_of(half)
    for batch in (1, 2, 1, 3):
        read(half, torch.zeros(batch, 2, dtype=torch.long), reader=reader, chunk=2)
    assert list(reader.prompts) == [(1, 64), (3, 64)]


def test_captured_prompts_share_the_memory_of_one_that_still_exists():
    """The memory of a graph that is gone must not be used for another one: torch refuses it."""
    captured = {n: SimpleNamespace(graphs=[SimpleNamespace(pool=lambda n=n: ("pool", n))]) for n in (1, 2)}
    held = {0: SimpleNamespace(graphs=[]), **captured}
    assert captured_prompt.shared_pool(held.values()) == ("pool", 1)
    del held[1]
    assert captured_prompt.shared_pool(held.values()) == ("pool", 2)
    del held[2]
    assert captured_prompt.shared_pool(held.values()) is None
