"""`glass convert` as a user meets it."""

import torch

import glassformer as gf
from tests.cli.asking import run, run_json


def test_convert_there_and_back(capsys, folder, tmp_path):
    code, out, _ = run(capsys, "convert", folder, tmp_path / "hf", "--to", "hf")
    assert code == 0
    assert "pass" in out
    code, result = run_json(capsys, "convert", tmp_path / "hf", tmp_path / "back", "--to", "glass")
    assert code == 0
    assert result["findings"][0]["measured"] == 0.0
    ours, back = gf.load(folder).state_dict(), gf.load(tmp_path / "back").state_dict()
    assert all(torch.equal(ours[name], back[name]) for name in ours)
    assert (tmp_path / "back" / "tokenizer.json").exists()


def test_convert_refuses_a_folder_of_something_else_before_it_reads_a_model(capsys, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    code, _, said = run(capsys, "convert", "no/such-model", tmp_path)
    assert code == 2
    assert "is not empty and not a model folder" in said
