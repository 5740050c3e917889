"""A cache that outlives a generation: what is computed over it is what is computed without it."""

import dataclasses

import pytest
import torch

import glassformer as gf
from glassformer import config as c
from glassformer.errors import GlassformerError
from glassformer.generation.engine import EngineError
from glassformer.generation.kept import KeptCache, KernelTurn, TorchTurn, roomy, shared_prefix
from glassformer.generation.request import read_request
from glassformer.generation.state import CapturedState
from tests import variants
from tests.cli.asking import has_compiler

needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler here")
ENGINES = ["torch", pytest.param("native", marks=needs_compiler)]
SCHEMES = {"learned": c.Learned(), "rotary": c.Rotary(), "alibi": c.Alibi(), "t5": c.T5Bias(buckets=8)}


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def model_of(position, **changes):
    config = variants.decoder(position=position, max_len=700, **changes)
    return gf.build(c.replace(config, init_std=0.3), seed=1).eval()


def ids_of(model, count=650):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.config.vocab_size, (count,), generator=generator).tolist()


def turn(kept, prompt, more=(4, 2), **changes):
    """Return the state of a turn and its logits, after the prompt and after each of some tokens."""
    state, chosen = kept.state(read_request(kept.model, [prompt], len(more) + 1, **changes))
    logits = [state.start(), *(state.step(torch.tensor([token])) for token in more)]
    return state, chosen, torch.stack(logits, 1)


def check(kept, prompt, more=(4, 2), **changes):
    """Compare a turn with the model itself, and return how many tokens were not read again."""
    state, _, logits = turn(kept, prompt, more, **changes)
    wanted = kept.model(torch.tensor([[*prompt, *more]]))[:, -len(more) - 1 :]
    torch.testing.assert_close(logits, wanted, atol=2e-5, rtol=2e-5)
    return state.reused


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", SCHEMES)
def test_a_cache_that_grows_and_shrinks_equals_none(name, engine):
    """Prompts of changing lengths, also longer than the first capacity, and with a window."""
    model = model_of(SCHEMES[name], window=9)
    kept, ids = KeptCache(model), ids_of(model)
    prompts = (ids[:5], ids[:40], [*ids[:30], 0, 1], ids[:500], [1, *ids[:20]])
    reused = [check(kept, prompt, engine=engine) for prompt in prompts]
    assert reused[0] == 0
    assert reused[1] >= 5
    assert reused[2] == 30
    assert reused[3] >= 30
    assert reused[4] == 0 or ids[0] == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_an_answer_longer_than_the_room_for_it_makes_more(engine):
    model = model_of(c.Rotary())
    kept, ids = KeptCache(model), ids_of(model)
    assert check(kept, ids[:200], ids[200:600], engine=engine) == 0
    assert check(kept, ids[:640], engine=engine) == 600


@needs_compiler
def test_room_is_made_when_it_is_needed():
    model = model_of(c.Rotary())
    kept = KeptCache(model)
    turn(kept, [1, 2, 3], engine="native")
    assert kept.kept.decoder.capacity == 256
    first = kept.kept.decoder
    turn(kept, [1, 2, 3, 4], engine="native")
    assert kept.kept.decoder is first
    turn(kept, list(range(1, 31)) * 9, engine="native")
    assert kept.kept.decoder.capacity == 512
    assert (roomy(5, None), roomy(300, None), roomy(300, 400), roomy(600, 400)) == (256, 512, 400, 600)


def test_the_last_token_of_a_prompt_is_always_read():
    assert shared_prefix([1, 2, 3], [1, 2, 3]) == 2
    assert shared_prefix([1, 2, 3], [1, 2, 3, 4]) == 3
    assert shared_prefix([1, 2], [2, 2]) == 0
    assert shared_prefix([], [5]) == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_a_turn_that_was_interrupted_leaves_no_wrong_cache(engine, monkeypatch):
    model = model_of(c.Rotary())
    kept, ids = KeptCache(model), ids_of(model)
    check(kept, ids[:40], engine=engine)
    state, _ = kept.state(read_request(model, [ids[:300]], 5, engine=engine))
    reads = "read" if engine == "native" else "forward"
    broken = kept.kept.decoder if engine == "native" else model.blocks[1]
    with monkeypatch.context() as patch:

        def interrupted(*given, **named):
            raise KeyboardInterrupt

        patch.setattr(broken, reads, interrupted)
        with pytest.raises(KeyboardInterrupt):
            state.start()
    assert check(kept, ids[:350], engine=engine) == (40 if engine == "native" else 0)
    assert check(kept, ids[:360], engine=engine) == 350


@pytest.mark.parametrize("engine", ENGINES)
def test_keys_with_other_rotary_frequencies_are_not_used(engine):
    """LongRoPE: prompts above 20 tokens have other frequencies than those up to 20."""
    half = variants.decoder().d_head // 2
    model = model_of(c.Rotary(scaling=c.LongScaling((1.0,) * half, (4.0,) * half, original_max_len=20)))
    kept, ids = KeptCache(model), ids_of(model)
    lengths = (10, 15, 30, 40, 12, 14, 300)
    assert [check(kept, ids[:n], ids[n : n + 3], engine=engine) for n in lengths] == [0, 13, 0, 33, 0, 13, 0]


@needs_compiler
def test_engine_and_precision_are_chosen_as_for_any_generation(monkeypatch):
    monkeypatch.delenv("GLASSFORMER_NATIVE")
    model = model_of(c.Rotary())
    kept = KeptCache(model)
    state, chosen, exact = turn(kept, [1, 2, 3])
    assert isinstance(state, KernelTurn)
    assert (chosen.engine, chosen.precision) == ("native", "float32")
    assert state.owns_threads
    state, chosen, near = turn(kept, [1, 2, 3], precision="bfloat16")
    assert (state.reused, chosen.precision) == (0, "bfloat16")  # its keys are others
    assert 0 < float((near - exact).abs().max() / exact.abs().max()) < 0.1
    state, chosen, _ = turn(kept, [1, 2, 3, 4], engine="torch")
    assert isinstance(state, TorchTurn)
    assert (state.reused, chosen.why) == (0, "requested")
    assert state.model is model
    assert turn(kept, [1, 2, 3, 4, 5], engine="torch")[0].reused == 4
    with pytest.raises(EngineError, match="fp8"):
        turn(kept, [1, 2], precision="fp8")


@needs_compiler
def test_kernels_that_cannot_be_made_are_replaced_by_torch_or_refused(monkeypatch):
    monkeypatch.delenv("GLASSFORMER_NATIVE")

    def broken(*given):
        raise GlassformerError("no room.")

    decode = pytest.importorskip("glassformer.kernels.decode")
    kernel = dataclasses.replace(decode.DECODE_KERNELS[0], make=broken)
    monkeypatch.setattr(decode, "DECODE_KERNELS", (kernel,))
    kept = KeptCache(model_of(c.Rotary()))
    state, chosen, _ = turn(kept, [1, 2, 3])
    assert isinstance(state, TorchTurn)
    assert chosen.why == "the kernels could not be compiled: no room"
    with pytest.raises(GlassformerError, match="no room"):
        turn(kept, [1, 2, 3], engine="native")


def test_where_steps_are_captured_each_turn_reads_the_conversation_again(monkeypatch):
    decode = pytest.importorskip("glassformer.kernels.decode")
    monkeypatch.delenv("GLASSFORMER_NATIVE")
    graph = dataclasses.replace(decode.DECODE_KERNELS[-1], device="cpu", capacity_step=16)
    monkeypatch.setattr(decode, "DECODE_KERNELS", (graph,))
    model = model_of(c.Rotary())
    kept, ids = KeptCache(model), ids_of(model)
    used = []
    for length in (5, 40, 180):
        state, _, logits = turn(kept, ids[:length], more=[3] * 40)
        wanted = model(torch.tensor([[*ids[:length], *[3] * 40]]))[:, -41:]
        assert isinstance(state, CapturedState)
        torch.testing.assert_close(logits, wanted, atol=2e-5, rtol=2e-5)
        used.append(state.steps)
        del state
    assert kept.kept is None
    assert used[0] is used[1] is used[2]  # with room for 256 tokens, they need not be captured again
