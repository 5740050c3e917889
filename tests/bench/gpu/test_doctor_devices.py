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
    assert [line.split(":")[0] for line in row.compared] == ["float32", "bfloat16"]
    assert all("units in the last place" in line for line in row.compared)
    assert row.text().startswith("tiny")


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
