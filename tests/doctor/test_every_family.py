"""Our own engine is healthy in the doctor's eyes, in every architecture that it can load.

The configs are those of the family tests, in which each feature of an architecture moves the logits.
"""

import functools

import pytest
import torch

import glassformer as gf
from glassformer.weights import load_config
from tests.weights import test_decoders, test_encoders, test_seq2seq
from tests.weights.tiny import saved

REFERENCES = {
    **{name: functools.partial(test_encoders.reference, name) for name in test_encoders.CASES},
    **{name: functools.partial(test_seq2seq.reference, name) for name in test_seq2seq.CASES},
    **{name: functools.partial(test_decoders.reference, name, torch.float32) for name in test_decoders.CASES},
}
FEW = ("modernbert",)
"""Windows in an encoder were taken for a bug once."""


def examined(name, folder):
    report = gf.diagnose(gf.build(load_config(saved(REFERENCES[name](), folder)), seed=0))
    assert report.healthy, report.text()


@pytest.mark.parametrize("name", FEW)
def test_some_families_are_healthy(tmp_path, name):
    examined(name, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # by transformers' GPTBigCode
@pytest.mark.parametrize("name", [name for name in REFERENCES if name not in FEW])
def test_every_family_is_healthy(tmp_path, name):
    examined(name, tmp_path)
