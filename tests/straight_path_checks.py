"""The straight path: how far it is to the attention kernel, and how many files a command enters."""

from pathlib import Path

import pytest
import torch

from glassformer.cli import main
from glassformer.cli.parse import VERBS
from glassformer.config import presets
from glassformer.model import build
from tests.straight_path import body_lines, describe, describe_files, own_files, trace, trace_to_attention

MOST_LINES, MOST_FRAMES = 60, 9
MOST_FILES = {"sample": 25, "train": 35}
"""Files that a whole command may enter, from its call to its exit, when it has run before."""
SMALL = {"n_layers": 2, "vocab_size": 61, "max_len": 16}
CONFIGS = {
    "gpt2": presets.gpt2(d_model=32, attention__n_heads=4, feedforward__d_ff=64, **SMALL),
    "llama_tiny": presets.llama_tiny(**SMALL),
}


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_few_lines_from_token_ids_to_softmax(name):
    model = build(CONFIGS[name]).eval()
    cache = model.new_cache("static", 8)
    frames, _ = trace_to_attention(lambda: model(torch.tensor([[1, 2, 3]]), cache=cache))
    print(describe(frames))
    assert frames[-1].co_qualname.startswith("Attention.")
    assert sum(map(body_lines, frames)) <= MOST_LINES, describe(frames)


def sample(tokens: int) -> None:
    assert main(["sample", "ROMEO:", "--engine", "torch", "--max-new-tokens", str(tokens)]) == 0


def test_few_frames_from_the_command_line_to_attention(capsys):
    sample(1)  # so that imports and caches are no part of the path
    frames, _ = trace_to_attention(lambda: sample(4))
    with capsys.disabled():
        print(f"\n{describe(frames)}")
    assert frames[0].co_qualname == "main"
    assert len(frames) <= MOST_FRAMES, describe(frames)


def train(folder: Path, name: str) -> None:
    """Two steps of a small model in plain torch, as `--engine torch` samples in plain torch."""
    settings = ("loop.steps=2", "model.n_layers=2", "model.d_model=32", "data.corpus=embedded", "machine.compile=no")
    words = [word for setting in (*settings, f"data.cache={folder / 'tokens'}") for word in ("--set", setting)]
    assert main(["train", *words, "--out", str(folder / name), "--no-latest"]) == 0


@pytest.mark.parametrize("command", MOST_FILES)
def test_a_command_enters_few_files(command, capsys, tmp_path):
    def call(name: str) -> None:
        sample(4) if command == "sample" else train(tmp_path, name)

    call("first")  # so that imports and caches are no part of the path
    files = own_files(trace(lambda: call("second")))
    with capsys.disabled():
        print(f"\nglass {command}:\n{describe_files(files)}")
    assert {"cli/__init__.py", "model/attention.py", f"cli/{VERBS[command]}.py"} <= files.keys()
    assert len(files) <= MOST_FILES[command], describe_files(files)
    assert not any(name.startswith("kernels/") for name in files), "plain torch was asked for"


def test_a_step_is_as_short_as_the_first_pass(monkeypatch, capsys):
    """The trace above ends in the prompt's pass; a cached step takes as many frames."""
    from glassformer.generation.state import TorchState

    first = TorchState.start

    def start_untraced(state):
        with torch._C.DisableTorchFunction():
            return first(state)

    monkeypatch.setattr(TorchState, "start", start_untraced)
    frames, _ = trace_to_attention(lambda: sample(4))
    assert "TorchState.step" in [frame.co_qualname for frame in frames]
    assert len(frames) <= MOST_FRAMES, describe(frames)
