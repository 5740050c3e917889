"""The table of the doctor on two devices; here both are the CPU."""

import pytest
import torch

from glassformer.bench.gpu import doctor_devices
from glassformer.config import presets
from glassformer.model import build


def test_a_row_has_the_verdicts_and_the_rounding_errors_of_both():
    model = build(presets.nano(n_layers=1, d_model=16, n_heads=2, vocab_size=31, max_len=16), seed=0)
    row = doctor_devices.examine("tiny", model, torch.device("cpu"), quick=True)
    assert (row.cpu, row.device, row.unlike, row.sound) == ("healthy", "healthy", (), True)
    assert len(row.compared) == 2
    assert all(line.startswith("same, ") and line.endswith(" ulp") for line in row.compared)
    text = doctor_devices.table([row])
    assert "| tiny  | healthy     | healthy" in text
    assert {len(line) for line in text.splitlines()} == {len(text.splitlines()[0])}


@pytest.mark.slow
def test_a_row_that_differs_is_written_out(monkeypatch):
    """The device's report is that of a broken model, and so are its logits."""
    good = build(presets.nano(n_layers=1, d_model=16, n_heads=2, vocab_size=31, max_len=16), seed=0)
    bad = build(presets.nano(n_layers=1, d_model=16, n_heads=2, vocab_size=31, max_len=16), seed=0)
    bad.decoder.causal = False
    diagnose, compare = doctor_devices.diagnose, doctor_devices.compare
    models = iter((good, bad))
    monkeypatch.setattr(doctor_devices, "diagnose", lambda model, **given: diagnose(next(models), **given))
    monkeypatch.setattr(doctor_devices, "compare", lambda a, b, **given: compare(a, bad, **given))
    row = doctor_devices.examine("tiny", good, torch.device("cpu"), quick=True)
    assert (row.cpu, row.device, row.sound, len(row.apart)) == ("healthy", "causal_leak", False, 2)
    text = doctor_devices.table([row])
    assert "DIFFERS" in text
    assert "tiny: float32: they differ at" in text
    assert "tiny: causal_leak/future-token: pass on the CPU, fail" in text


@pytest.mark.slow
def test_several_processes_give_the_table_of_one(capsys):
    assert (
        doctor_devices.main(["--device", "cpu", "--quick", "--workers", "2", *list(doctor_devices.models())[:2]]) == 0
    )
    out = capsys.readouterr().out
    assert "| glassformer nano" in out
    assert "2 of 2 models: the same diagnoses on both" in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [(["--device", "gpu"], "is not known"), (["--device", "cpu", "no-such-model"], "no model is called")],
)
def test_wrong_arguments_are_refused(capsys, arguments, sentence):
    assert doctor_devices.main(arguments) == 2
    assert sentence in capsys.readouterr().err


def test_our_engine_and_ten_classes_are_examined():
    assert len(doctor_devices.CLASSES) == 10
    assert len(doctor_devices.models()) == 13


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_all_models_on_a_gpu():
    assert doctor_devices.main([]) == 0
