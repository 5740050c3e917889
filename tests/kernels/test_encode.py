"""Which kernel encodes, and what each refuses of the config fields."""

import dataclasses

import pytest
import torch

from glassformer import config as c
from glassformer.generation.engine import Call
from glassformer.kernels import encode
from glassformer.kernels.decode import choose_decoder
from glassformer.kernels.toolchain import cxx
from tests.kernels.test_decode_support import CHANGES

ENCODER = {field.name for field in dataclasses.fields(c.EncoderConfig)}


def as_encoder(config: c.ModelConfig) -> c.EncoderConfig:
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return c.EncoderConfig(**{name: value for name, value in fields.items() if name in ENCODER})


def call(config: c.ModelConfig, device: str, precision: str = "float32") -> Call:
    return Call(as_encoder(config), torch.float32, torch.device(device), precision=precision)


@pytest.mark.parametrize(
    ("device", "refused"),
    [
        ("cpu", {"position", "position=alibi.rounded", "attention.latent"}),
        ("cuda", {"feedforward"}),  # mixtures of experts
    ],
)
def test_the_refused_fields_are_these(device, refused, monkeypatch):
    """test_captured_encoder.py and test_encoder.py compare what is supported with torch."""
    monkeypatch.setattr(cxx, "compiler", lambda: "c++")
    found = set()
    for name, (start, changed) in CHANGES.items():
        supported = [encode.choose_encoder(call(config, device))[0] is not None for config in (start, *changed)]
        if supported[0] and not all(supported):
            found.add(name)
    assert found == refused
    lengths = CHANGES["position=rotary.scaling=long.short"][0]  # frequencies that depend on the length of a text
    assert encode.choose_encoder(call(lengths, device))[0] is None


def test_a_device_has_one_kernel_and_others_have_none():
    start = CHANGES["norm"][0]
    kernels = [encode.choose_encoder(call(start, device))[0] for device in ("cpu", "cuda", "mps")]
    assert [kernel and kernel.name for kernel in kernels] == ["cpu-encode", "cuda-encode", None]
    assert "the model is on mps" in encode.choose_encoder(call(start, "mps"))[1]
    assert "have no fp8" in encode.choose_encoder(call(start, "cpu", "fp8"))[1]
    assert "not in int8" in encode.choose_encoder(call(start, "cuda", "int8"))[1]
    exact = Call(as_encoder(start), torch.float64, torch.device("cpu"))
    assert "weights are float64" in encode.choose_encoder(exact)[1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_config_with_lists_is_supported_as_one_with_tuples(device, monkeypatch):
    """It has no hash, so what is supported cannot be looked up."""
    monkeypatch.setattr(cxx, "compiler", lambda: "c++")
    start, given = CHANGES["norm"][0], []
    for eos in ((3,), [3]):
        config = dataclasses.replace(start, special=c.Special(eos=eos))
        calls = [call(config, device), Call(config, torch.float32, torch.device(device))]
        given.append([encode.choose_encoder(calls[0]), choose_decoder(calls[1])])
    assert given[0] == given[1]
    assert given[0][0][0] is not None
    assert given[0][1][0] is not None


def test_each_entry_names_its_test():
    from tests.test_architecture import ROOT

    assert len({kernel.name for kernel in encode.ENCODE_KERNELS}) == len(encode.ENCODE_KERNELS)
    assert all((ROOT / kernel.test).exists() for kernel in encode.ENCODE_KERNELS)
