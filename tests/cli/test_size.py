"""`glass size` as a user meets it."""

import json

from tests.cli.asking import run, run_json


def test_size_of_a_preset(capsys):
    code, out, _ = run(capsys, "size", "gpt2")
    assert code == 0
    assert "124,439,808" in out
    code, sheet = run_json(capsys, "size", "gpt2", "--batch", "2", "--context", "64")
    assert code == 0
    assert "124439808" in json.dumps(sheet)


def test_size_of_a_folder_and_of_a_file(capsys, folder):
    _, by_folder = run_json(capsys, "size", folder)
    _, by_file = run_json(capsys, "size", folder / "model.toml")
    assert by_folder == by_file


def test_size_chinchilla_and_jl(capsys):
    code, out, _ = run(capsys, "size", "chinchilla", "--flops", "1.2e24")
    assert code == 0
    assert "rule D = 20·N                 1e+11     2e+12  20.0  1.2e+24" in out
    code, result = run_json(capsys, "size", "chinchilla", "--flops", "1.2e24")
    assert "100000000000.0" in json.dumps(result)
    code, out, _ = run(capsys, "size", "jl", "--points", "1e12", "--eps", "0.1")
    assert code == 0
    assert "22,105" in out


def test_in_a_terminal_of_eighty_columns_no_line_is_longer(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    subjects = "gpt2", "plan", "plan --model llama2_7b", "chinchilla --flops 1.2e24", "jl --points 1e12"
    for command in (["env"], *(["size", *subject.split()] for subject in subjects)):
        code, out, _ = run(capsys, *command)
        assert code == 0
        assert max(map(len, out.splitlines())) <= 80
