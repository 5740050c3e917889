"""`glass env` as a user meets it: what the commands themselves use, and a measurement that knows when it is none."""

import pytest
import torch

from glassformer.cli import env
from glassformer.model.device import Throughput
from glassformer.training.events import implementation
from tests.cli.asking import has_compiler, run, run_json
from tests.training import tiny


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """The stopwatch is tested with the device; here it is only shown."""
    found = {"float32": Throughput(123.4, 1024, 4, False), "bfloat16": Throughput(0.5, 1024, 9, True)}
    monkeypatch.setattr(env, "throughputs", lambda device: found)


def test_env_gives_an_answer_per_command_and_its_reason(capsys):
    code, out, _ = run(capsys, "env")
    assert code == 0
    assert "123 GFLOP/s in float32 (1024 x 1024); bfloat16 not measured: other work disturbed all 9 rounds" in out
    code, facts = run_json(capsys, "env")
    assert code == 0
    for command in ("train", "sample"):
        answer = facts[command]
        assert answer.keys() == {"device", "precision", "implementation", "why"}
        assert f"{command:<8}{answer['device']}, {answer['precision']}, {answer['implementation']}: " in out
    assert facts["gflops"] == {"float32": 123.4, "bfloat16": None}
    assert facts["versions"]["torch"].startswith("2.")


@pytest.mark.parametrize("flags", [(), ("avx512f", "avx2", "fma", "amx_bf16")])
@pytest.mark.parametrize("width", [64, 256])
def test_train_does_what_env_says(capsys, monkeypatch, tmp_path, flags, width):
    """For any machine and any width: the same function decides."""
    from glassformer import training
    from glassformer.model import device
    from glassformer.training.loop import prepare_state

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device, "processor_flags", lambda: frozenset(flags))
    default = tiny.session(tmp_path, f"model.d_model={width}", "model.n_heads=4", "machine.precision=auto").run
    monkeypatch.setattr(training, "read_run", lambda *_, **__: default)
    _, facts = run_json(capsys, "env")
    state = prepare_state(default)
    assert facts["train"]["device"] == state.device.type
    assert facts["train"]["precision"] == str(state.dtype).removeprefix("torch.")
    assert (facts["train"]["implementation"] == "native") == bool(state.kernels)
    assert implementation(state.compiled, state.kernels) == facts["train"]["implementation"]


@pytest.mark.parametrize("compiler", [None, pytest.param("its own", marks=pytest.mark.skipif(
    not has_compiler(), reason="no C++ compiler here"))])  # fmt: skip
def test_sample_does_what_env_says(capsys, monkeypatch, compiler):
    monkeypatch.delenv("GLASSFORMER_NATIVE")
    if compiler is None and has_compiler():
        monkeypatch.setattr("glassformer.kernels.toolchain.cxx.compiler", lambda: None)
    _, facts = run_json(capsys, "env")
    _, result = run_json(capsys, "sample", "ROMEO:")
    used, message = result["engine"], facts["sample"]
    assert (used["engine"], used["device"], used["precision"]) == (
        message["implementation"], message["device"], message["precision"]
    )  # fmt: skip
    assert used["engine"] == ("torch" if compiler is None else "native")


def test_decimals():
    assert [env.decimals(x) for x in (1234.5, 100.2, 87.64, 0.4321)] == ["1,234", "100", "87.6", "0.432"]
