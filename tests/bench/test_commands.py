"""Every developer benchmark starts: `--help` works, and a GPU command without a GPU ends in one sentence."""

import importlib
import itertools
import pkgutil
import sys

import pytest
import torch

import glassformer.bench.developer
import glassformer.bench.gpu
from glassformer.bench.commands import in_process, in_turns, random_batch, seconds_of, spread
from glassformer.bench.developer import lora, memory, speculative
from glassformer.config import presets
from glassformer.model import build

FOLDERS = (glassformer.bench.gpu, glassformer.bench.developer)
MODULES = [f"{folder.__name__}.{found.name}" for folder in FOLDERS for found in pkgutil.iter_modules(folder.__path__)]
SHARED = ("cuda_kernels", "device", "tiny_transformers")
"""Modules that the commands import, and that are not commands themselves."""
COMMANDS = [name for name in MODULES if not name.endswith(SHARED)]
GPU = [name for name in COMMANDS if ".gpu." in name]


def module_of(name):
    """Import a command; a benchmark of the kernels is skipped in a copy without them."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("glassformer.kernels"):
            raise
        pytest.skip(f"{error.name} was removed")


def test_there_are_commands():
    assert len(GPU) >= 5
    assert len(COMMANDS) - len(GPU) >= 7


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_its_help(name, monkeypatch, capsys):
    module = module_of(name)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert f"python -m {name}" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("name", GPU)
def test_a_gpu_command_without_a_gpu_ends_in_one_sentence(name, monkeypatch, capsys):
    module = module_of(name)
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 2
    assert "needs a CUDA device" in capsys.readouterr().err


def test_an_unknown_case_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["memory", "train gpt5"])
    with pytest.raises(SystemExit) as ended:
        memory.main()
    assert ended.value.code == 2
    assert "'train gpt2'" in capsys.readouterr().err


@pytest.mark.slow
def test_fine_tuning_is_compared_with_peft(monkeypatch, capsys):
    pytest.importorskip("peft")
    tiny = {"vocab_size": 600, "d_model": 32, "n_heads": 2, "d_ff": 48, "max_len": 32}
    monkeypatch.setattr(lora.presets, "get", lambda name, **changes: presets.gpt2(**tiny, **changes))
    monkeypatch.setattr(
        sys, "argv", ["lora", "--layers", "1", "--batch", "2", "--context", "16", "--rounds", "1", "--steps", "2"]
    )
    lora.main()
    first, second, *table = capsys.readouterr().out.splitlines()
    assert first.split("first loss ")[1].split(",")[0] == second.split("first loss ")[1].split(",")[0]
    assert [line.split()[0] for line in table] == ["glassformer", "peft"]


def test_the_block_benchmark_of_speculative_decoding_runs(monkeypatch, capsys):
    tiny = build(presets.gpt2(n_layers=1, d_model=16, n_heads=2, d_ff=16), seed=0).eval()
    monkeypatch.setattr(speculative, "gpt2", lambda: tiny)
    speculative.blocks(["torch"], rounds=1)
    assert "torch" in capsys.readouterr().out.splitlines()[1]


def test_contenders_take_turns_and_another_one_begins_each_round():
    called, clock = [], itertools.count()

    def contender(name):
        called.append(name)
        return float(next(clock))

    times = in_turns({name: lambda name=name: contender(name) for name in "abc"}, rounds=2, warm_up=1)
    assert "".join(called) == "cab" + "abc" + "bca"
    assert times == {"a": [3.0, 8.0], "b": [4.0, 6.0], "c": [5.0, 7.0]}
    assert spread([1.0, 2.0, 4.0]) == 1.5
    assert seconds_of(lambda: None) >= 0


def test_targets_of_a_random_batch_are_the_next_tokens():
    batch, again, other = (random_batch(3, 16, 11, seed) for seed in (5, 5, 6))
    assert batch.inputs.shape == batch.targets.shape == (3, 16)
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    assert 0 <= int(batch.inputs.min()) <= int(batch.inputs.max()) < 11
    assert torch.equal(batch.inputs, again.inputs)
    assert not torch.equal(batch.inputs, other.inputs)


def test_a_module_in_a_fresh_process_answers_in_json(tmp_path, monkeypatch):
    (tmp_path / "answering.py").write_text(
        "import json, os, sys\nprint('a library prints this')\nprint(json.dumps({'given': sys.argv[1:]}))\n"
        "print(json.dumps([os.environ['OMP_NUM_THREADS'], os.environ['EXTRA']]))\n"
    )
    (tmp_path / "failing.py").write_text("raise SystemExit('no such case')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert in_process("answering", "one", EXTRA="2") == [{"given": ["one"]}, ["1", "2"]]
    with pytest.raises(SystemExit, match="no such case"):
        in_process("failing")
