"""The trial of fused blocks on a GPU, with kernels compiled for the CPU: it passes right ones and finds wrong ones."""

import json
import warnings

import pytest
import torch

from glassformer import config as c
from glassformer.config import presets
from glassformer.kernels.cuda.training import between, copies, projections, trial
from tests.emulated_cuda import needs_compiler
from tests.kernels.cuda.training.emulated_between import emulate

CPU = torch.device("cpu")
LLAMA = c.DecoderConfig(
    vocab_size=67, d_model=64, n_layers=4, attention=c.Attention(n_heads=4, n_kv_heads=2, bias=False),
    feedforward=c.Gated(80, bias=False), position=c.Rotary(), max_len=32, norm=c.RMSNorm(), head=c.Head(),
)  # fmt: skip
GPT = c.replace(LLAMA, attention=c.Attention(n_heads=2), feedforward=c.Dense(96), norm=c.LayerNorm())

pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")


@pytest.fixture
def _emulated(monkeypatch):
    emulate(monkeypatch)


@needs_compiler
@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("config", [LLAMA, GPT])
def test_right_kernels_pass(config):
    assert trial.failure(trial._small(config), CPU) is None


def scaled_by(factor, function):
    def wrong(*given):
        first, *others = function(*given)
        return first * factor, *others

    return wrong


@needs_compiler
@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("factor", [1.1, float("nan")])
@pytest.mark.parametrize("name", ["norm_forward", "norm_backward"])
def test_wrong_kernels_are_found(monkeypatch, name, factor):
    monkeypatch.setattr(between, name, scaled_by(factor, getattr(between, name)))
    assert "is off by" in trial.failure(trial._small(LLAMA), CPU)


@needs_compiler
@pytest.mark.usefixtures("_emulated")
def test_kernels_that_are_wrong_for_a_narrow_stream_only_are_found(monkeypatch):
    right = between.norm_forward

    def wrong(stream, *given):
        total, out, statistics = right(stream, *given)
        return total, out * (1.1 if stream.dtype is torch.bfloat16 else 1), statistics

    monkeypatch.setattr(between, "norm_forward", wrong)
    assert "residual stream in torch.bfloat16: " in trial.failure(trial._small(LLAMA), CPU)


@needs_compiler
@pytest.mark.usefixtures("_emulated")
def test_wrong_copies_are_found(monkeypatch):
    """Copies are read the second time only."""
    right = projections.in_bfloat16
    wrong = lambda *given: right(*given) * (1.2 if hasattr(given[0], copies.COPY) else 1)  # noqa: E731
    monkeypatch.setattr(projections, "in_bfloat16", wrong)
    assert trial.failure(trial._small(LLAMA), CPU).startswith(
        "the kernels with copies of weights, residual stream in torch.float32: "
    )


def test_what_is_tried_has_the_blocks_of_the_model_and_few_words():
    small = trial._small(presets.llama3_2_1b())
    assert (small.n_layers, small.vocab_size) == (2, 512)
    assert c.replace(small, n_layers=16, vocab_size=128256, special=presets.llama3_2_1b().special) == (
        presets.llama3_2_1b()
    )
    windows = c.replace(LLAMA, attention__window=8, attention__window_layers=(1, 3))
    assert (trial._small(windows).attention.window, trial._small(windows).attention.window_layers) == (8, (0,))
    shared = c.replace(LLAMA, shared_blocks=(0, 0, 1, 1))
    assert trial._small(shared).shared_blocks == (0, 0)


@pytest.fixture
def _gpu(monkeypatch, tmp_path):
    """A GPU on which the trial runs in this test's place."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path))
    trial._is_successful.cache_clear()
    yield
    trial._is_successful.cache_clear()


@pytest.mark.usefixtures("_gpu")
def test_success_is_remembered_and_failure_is_reported_and_tried_again(monkeypatch):
    answers, asked = ["illegal access", None], []
    monkeypatch.setattr(trial, "_run", lambda text, device: asked.append(text) or answers[len(asked) - 1])
    with pytest.warns(UserWarning, match=r"not used for training on this GPU \(illegal access\): torch.compile"):
        assert not trial.is_successful(LLAMA, torch.device("cuda"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not trial.is_successful(LLAMA, torch.device("cuda"))  # once per process
        trial._is_successful.cache_clear()
        for _ in range(2):
            assert trial.is_successful(LLAMA, torch.device("cuda"))
            trial._is_successful.cache_clear()  # as in another process
        assert len(asked) == 2
        with pytest.raises(IndexError):  # another kind of block is tried
            trial.is_successful(GPT, torch.device("cuda"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels can be launched here")
def test_a_process_reports_why_it_failed():
    text = json.dumps(c.to_dict(trial._small(LLAMA)))
    assert trial._run(text, "cpu").startswith("RuntimeError: ")
