"""`python -m glassformer.bench`: the options of `glass bench` without the packages of the command line."""

import dataclasses
import inspect
import json

import pytest
import torch

from glassformer.bench import __main__ as command
from glassformer.bench.plan import Plan


@pytest.mark.usefixtures("fake_processes")
def test_a_table_and_a_json_file(subject, tmp_path, capsys):
    file = tmp_path / "b.json"
    given = ["decode", "--model", str(subject.root / "hf"), "--against", "gpt-fast", "--precision", "float32"]
    given += ["--prompt", "4", "--new", "3", "--rounds", "2", "--keep", str(tmp_path), "--json", str(file)]
    assert command.main(given) == 0
    assert "glassformer-torch" in capsys.readouterr().out
    assert (
        json.loads(file.read_text())["plan"] | {"rounds": 2, "prompt": 4, "device": "cpu"}
        == json.loads(file.read_text())["plan"]
    )
    assert command.main(given) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_mistake_is_one_sentence_and_exit_2(capsys):
    for given in (["decode", "--against", "lama.cpp"], ["prefill", "--device", "cuda"]):
        assert command.main(given) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_it_has_every_option_of_the_command_line():
    from glassformer.cli.bench import bench

    options = set(inspect.signature(bench).parameters) - {"force", "task"}
    assert options <= {name.replace("-", "_") for name in _options()}
    assert {field.name for field in dataclasses.fields(Plan)} - {"task", "precisions", "checkouts"} <= {
        name.replace("-", "_") for name in _options()
    }


def _options():
    return (*command.NUMBERS, *command.FLAGS, *command.CHECKOUTS, *command.OTHERS)
