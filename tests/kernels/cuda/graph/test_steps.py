"""Generation by captured steps: what torch generates, for every kind of model. On a CPU the steps are not captured."""

import dataclasses
import gc
import types

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from glassformer import config as c
from glassformer.config import ConfigError
from glassformer.generation import Sampling, generate, loop, sampling, stream
from glassformer.generation.engine import Implementation, captured_dtype, in_precision
from glassformer.generation.state import CapturedState
from glassformer.kernels.cuda.graph import steps
from glassformer.kernels.cuda.graph.steps import captured_steps
from glassformer.kernels.decode import DECODE_KERNELS
from glassformer.model import build
from glassformer.model.moe import MoE
from tests.emulated_cuda import both_ways
from tests.kernels.cuda.graph.recorded import WAITS
from tests.variants import POSITIONS, decoder, lively

PROMPTS = [[3, 4, 5], [6, 2], [9, 8, 1, 7]]


@pytest.fixture
def through():
    """What makes the state of a generation: one with captured steps."""
    steps._LAST.clear()

    def make(model, request):
        state = CapturedState(
            in_precision(model, captured_dtype(model, "float32")), request.prompts, request.max_new_tokens,
            request.prefill_chunk, dataclasses.replace(DECODE_KERNELS[-1], capacity_step=16), "float32",
        )  # fmt: skip
        return state, Implementation("native", "cuda", "float32", "emulated")

    return make


@pytest.fixture
def captured(monkeypatch, through):
    """`generate` by captured steps and by torch."""

    return both_ways(monkeypatch, through)


def seq2seq() -> c.Seq2SeqConfig:
    return c.Seq2SeqConfig(
        vocab_size=31, d_model=16, n_layers=2, n_encoder_layers=2, attention=c.Attention(4), feedforward=c.Dense(24),
        position=c.T5Bias(buckets=8, max_distance=20), norm=c.RMSNorm(),
    )  # fmt: skip


CONFIGS = {
    **{name: decoder(position=POSITIONS[name]) for name in ("learned", "rotary-halves", "alibi", "t5", "none")},
    "windows": decoder(attention__window=3),
    "experts": decoder(feedforward=c.MoE(5, 2, c.Gated(11))),
    "encoder-decoder": seq2seq(),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_and_beams_of_ragged_prompts_are_torchs(name, captured):
    model = lively(CONFIGS[name], std=0.4)[0].float()
    found, wanted = captured(model, PROMPTS, 7, stop=[])
    assert found == wanted
    found, wanted = captured(model, PROMPTS, 5, beams=3, stop=[])
    assert found == wanted


def test_sampling_stops_and_changed_weights_are_torchs(captured):
    model = lively(CONFIGS["rotary-halves"], std=0.4)[0].float()
    sampling = Sampling(top_k=5, repetition_penalty=1.3)
    found, wanted = captured(model, PROMPTS, 6, sampling, seed=4)
    assert found == wanted
    stop = wanted.new[0][1]
    found, wanted = captured(model, PROMPTS, 6, sampling, seed=4, stop=[stop])
    assert (found, found.finished) == (wanted, wanted.finished)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    found, wanted = captured(model, PROMPTS, 6)
    assert found == wanted


SAMPLINGS = {
    "temperature": Sampling(0.7),
    "top-k": Sampling(0.8, 4),
    "top-p and min-p": Sampling(1.0, None, 0.8, 0.02),
    "all": Sampling(1.1, 6, 0.9, 0.01, 1.3),
    "greedy with a penalty": Sampling(0.0, repetition_penalty=1.5),
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_sampled_tokens_are_drawn_in_runs_and_are_torchs(name, captured, monkeypatch):
    """Also where a config suppresses tokens and forces the last one."""
    model = lively(
        decoder(position=c.Rotary(), max_len=80, special=c.Special(suppressed=(3, 7), forced_eos=5)), std=0.4
    )
    begun, original = [], CapturedState._begin
    monkeypatch.setattr(CapturedState, "_begin", lambda *given: (begun.append(given[2]), original(*given))[1])
    for seed in (0, [1, 2, 3]):
        found, wanted = captured(model[0].float(), PROMPTS, 70, SAMPLINGS[name], seed=seed, stop=[])
        assert found == wanted
        assert all(row[-1] == 5 and not {3, 7} & set(row) for row in found.new)
    assert begun == [1, 2, 4, 8, 16, 32, 6] * 2


class Waiting(TorchDispatchMode):
    """Refuses operations for whose result the host would wait."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (name := func.__name__.partition(".")[0]) in WAITS:
            raise AssertionError(f"the host waits for {name}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("vocab_size", [31, 500])
def test_the_host_does_not_wait_while_tokens_are_drawn_in_runs(name, vocab_size, captured, monkeypatch):
    special = c.Special(suppressed=(3, 7), forced_eos=5)
    config = decoder(position=c.Rotary(), max_len=80, vocab_size=vocab_size, special=special)
    model, chosen = lively(config, std=0.4)[0].float(), []
    monkeypatch.setattr(sampling, "_is_readable", lambda logits: False)  # as on a GPU
    original = loop.Steps._choose_in_run

    def strict(*given):
        with Waiting():
            chosen.append(original(*given))
        return chosen[-1]

    monkeypatch.setattr(loop.Steps, "_choose_in_run", strict)
    found, wanted = captured(model, PROMPTS, 20, SAMPLINGS[name], stop=[])
    assert found == wanted
    assert len(chosen) == 19


@pytest.mark.parametrize("at", [1, 5, 11])
def test_a_draw_from_nan_within_a_run_is_refused(at, captured, monkeypatch):
    """The steps that were begun after it read some token: nothing is read outside of the embedding."""
    model, count, original = lively(CONFIGS["learned"], std=0.4)[0].float(), iter(range(100)), loop.choose

    def broken(logits, *given):
        # only calls of the captured steps count: torch's come first
        return original(logits * float("nan") if next(count) == 12 + at else logits, *given)

    monkeypatch.setattr(loop, "choose", broken)
    with pytest.raises(ConfigError, match="not all numbers"):
        captured(model, PROMPTS, 12, Sampling(), stop=[])


def test_the_last_capture_is_used_again_if_it_fits(captured):
    model = lively(CONFIGS["learned"], std=0.4)[0].float()
    captured(model, PROMPTS, 4, stop=[])
    first = steps._LAST[model][1]
    found, wanted = captured(model, [[1, 2], [3, 4, 5], [6]], 5, stop=[])
    assert steps._LAST[model][1] is first
    assert found == wanted
    captured(model, PROMPTS[:2], 4, stop=[])
    assert steps._LAST[model][1] is not first


@pytest.mark.parametrize("stop", ["first", "second"])
def test_generations_at_the_same_time_do_not_share_their_steps(through, monkeypatch, stop):
    model = lively(CONFIGS["learned"], std=0.4)[0].float()
    prompts = [[[3, 4, 5]], [[6, 2, 9]]]
    wanted = [[list(new) for new in stream(model, one, 8, stop=[], engine="torch")] for one in prompts]
    monkeypatch.setattr(loop, "make_state", through)
    running = [stream(model, one, 8, stop=[]) for one in prompts]
    found = [[], []]
    for _ in range(4):
        for new, steps_of_one in zip(found, running, strict=True):
            new.append(next(steps_of_one))
    left = 0 if stop == "second" else 1
    running[1 - left].close()
    found[left] += list(running[left])
    assert found[left] == wanted[left]
    assert found[1 - left] == wanted[1 - left][:4]


def test_steps_are_used_again_when_their_generation_has_ended(through, monkeypatch):
    gc.collect()
    gc.disable()  # no cycle keeps a generation alive
    try:
        model = lively(CONFIGS["learned"], std=0.4)[0].float()
        monkeypatch.setattr(loop, "make_state", through)
        generate(model, [[3, 4, 5]], 8, stop=[])
        first = steps._LAST[model][1]
        running = stream(model, [[6, 2]], 8, stop=[])
        next(running), next(running)
        assert steps._LAST[model][1] is first
        generate(model, [[3, 4, 5]], 8, stop=[])
        assert steps._LAST[model][1] is not first
    finally:
        gc.enable()


def test_steps_made_in_inference_mode_serve_outside_of_it(captured):
    model = lively(CONFIGS["learned"], std=0.4)[0].float()
    with torch.inference_mode():
        captured(model, PROMPTS, 4, stop=[])
    found, wanted = captured(model, PROMPTS, 4, stop=[])
    assert found == wanted


def test_captured_steps_do_not_keep_a_model_alive(captured):
    model = lively(CONFIGS["learned"], std=0.4)[0].float()
    captured(model, PROMPTS, 4, stop=[])
    assert len(steps._LAST) == 1
    del model
    gc.collect()
    assert len(steps._LAST) == 0


def test_more_tokens_than_the_cache_holds_are_refused():
    model = build(CONFIGS["learned"])
    cache = model.new_cache("static", capacity=4)
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]), cache=cache)
    made = captured_steps(model, cache, 1, 4, "float32")
    made.step(torch.tensor([4]))
    with pytest.raises(ValueError, match="do not fit a cache of 4"):
        made.step(torch.tensor([5]))


def test_experts_are_restored_after_a_capture():
    model = build(CONFIGS["experts"])
    (mixture,) = [module for module in model.modules() if isinstance(module, MoE)][:1]
    x, plain = torch.randn(3, 14), mixture.mix
    gates, choice = torch.rand(3, 2), torch.tensor([[0, 3], [1, 2], [4, 0]])
    with torch.no_grad(), steps.experts_without_waiting(model):
        assert mixture.mix != plain
        every = mixture.mix(x, gates, choice)
    assert mixture.mix == plain
    torch.testing.assert_close(every, plain(x, gates, choice))


def test_what_is_not_fused_has_a_reason(monkeypatch):
    model = build(CONFIGS["learned"])
    assert "no float32" in steps.why_not_fused(model, 1, "float32")
    assert "up to 64 vectors, not 65" in steps.why_not_fused(model, 65, "int8")
    assert "d_model=14" in steps.why_not_fused(model, 1, "bfloat16")
    assert "decoder-only" in steps.why_not_fused(build(seq2seq()), 1, "bfloat16")


@pytest.mark.parametrize(
    ("capability", "room", "reason"),
    [
        ((8, 9), 101376, "the GPU is older than compute capability 9.0"),
        ((12, 0), 101376, "a block has 101376 bytes of shared memory on this GPU, and the kernels need 232448"),
    ],
)
def test_smaller_gpus_have_no_fused_kernels(monkeypatch, capability, room, reason):
    properties = types.SimpleNamespace(shared_memory_per_block_optin=room)
    monkeypatch.setattr(steps, "_unsupported_gpu", steps._unsupported_gpu.__wrapped__)  # which forgets the answer
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert steps.unsupported_device(torch.device("cuda")) == reason
