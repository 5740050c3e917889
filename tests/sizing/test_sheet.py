"""The sheet, and the public function `gf.size`."""

import json
import subprocess
import sys

import pytest
import torch

import glassformer as gf
from glassformer.config import presets
from glassformer.sizing import Sheet, count, inference_memory, size, training_memory


def test_the_public_function_returns_the_sheet_of_a_config():
    config = presets.nano()
    assert gf.size(config) == size(config)
    assert gf.size(config).parameters == count(config)


ORDERS = {
    "submodule first": "import glassformer.sizing; import glassformer as gf; s = gf.size(c())",
    "package first": "import glassformer as gf; s = gf.size(c()); import glassformer.sizing; t = gf.size(c())",
    "function": "from glassformer.sizing import size, count; s = size(c()); import glassformer as gf; gf.size(c())",
    "from the package": "from glassformer import size; s = size(c())",
}


@pytest.mark.parametrize("order", ORDERS)
def test_any_order_of_imports_works_and_none_brings_torch(order):
    code = f"from glassformer.config.presets import nano as c; {ORDERS[order]}; s.text(); s.to_dict(); import sys; "
    code += "assert not {'torch', 'numpy'} & set(sys.modules), 'heavy import'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", presets.ALL)
def test_every_preset_has_a_sheet_in_text_and_json(name):
    sheet = size(presets.get(name), batch=3, dtype="bfloat16")
    data = json.loads(json.dumps(sheet.to_dict()))
    assert data["parameters"]["total"] == sum(data["parameters"]["parts"].values()) == count(presets.get(name))
    assert data["flops"]["training"] == 3 * data["flops"]["total_forward"]
    training = data["memory"]["training"]
    assert training["peak"] == sum(training[k] for k in ("weights", "optimizer", "saved", "transient"))
    assert sheet.text()


def test_the_sheet_gathers_what_the_functions_say():
    config = presets.gpt2()
    sheet = size(config, batch=2, context=128, dtype="float16", optimizer="sgd")
    assert isinstance(sheet, Sheet)
    assert sheet.parameters == 124_439_808
    assert sheet.training == training_memory(config, 2, 128, "float16", "sgd")
    assert sheet.inference == inference_memory(config, 2, 128, "float16")
    assert sheet.chinchilla.allocations[0].tokens == 20 * 124_439_808


def test_the_note_is_there_exactly_where_the_model_itself_refuses():
    from glassformer.model import build

    small = {"vocab_size": 11, "d_model": 8, "n_layers": 1, "n_heads": 2, "max_len": 6}
    for config in (presets.gpt2(**small), presets.bert_base(**small)):
        model = build(config).eval()
        for length in (5, 6, 7):
            assert (size(config, context=length).note is None) == (length <= 6)
            try:
                model(torch.zeros(1, length, dtype=torch.long))
                ran = True
            except ValueError:
                ran = False
            assert ran == (length <= 6)
    assert size(presets.gpt2(), context=1025).to_dict()["note"] == size(presets.gpt2(), context=1025).note
    pair = presets.t5_small(max_len=64)
    assert size(pair, context=64, source=65).note is not None
    assert size(pair, context=64).to_dict()["note"] is None


def test_quantised_weights_have_no_training():
    sheet = size(presets.llama2_7b(), dtype="int4")
    assert sheet.training is None
    assert sheet.to_dict()["memory"]["training"] is None
    assert sheet.inference.weights == 6_738_415_616 // 2
    assert "TRAINING (bytes)" not in sheet.text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": 0}, "batch=0 must be a whole number of at least 1"),
        ({"batch": 1.5}, "batch=1.5 must be"),
        ({"context": -3}, "context=-3 must be"),
        ({"dtype": "fp8"}, "dtype='fp8' is not known. Use one of float64, float32"),
        ({"optimizer": "lion"}, "optimizer='lion' is not known. Use one of adamw, muon, sgd, none"),
        ({"source": 7}, "source=7 is for an encoder-decoder"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        size(presets.gpt2(), **arguments)
