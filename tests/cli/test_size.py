"""`glass size` as a user meets it."""

import json
from pathlib import Path

import pytest

from glassformer.config import presets
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


ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_can_be_sized_and_says_what_came_from_it(capsys, recipe):
    code, out, err = run(capsys, "size", recipe)
    assert (code, err) == (0, "")
    assert f"From {recipe}: batch " in out
    assert "MEMORY, TRAINING" in out
    code, sheet = run_json(capsys, "size", recipe)
    assert code == 0
    assert sheet["notes"][0].startswith(f"From {recipe}: batch {sheet['batch']:,}")


def test_options_replace_values_of_a_run_file(capsys):
    recipe = ROOT / "recipes" / "bard.toml"
    _, sheet = run_json(capsys, "size", recipe)
    assert (sheet["batch"], sheet["context"], sheet["optimizer"]) == (64, 256, "muon")
    _, sheet = run_json(capsys, "size", recipe, "--batch", 4, "--context", 32, "--optimizer", "adamw")
    assert (sheet["batch"], sheet["context"], sheet["optimizer"]) == (4, 32, "adamw")
    assert sheet["notes"][0] == f"From {recipe}: weights float32."
    _, sheet = run_json(capsys, "size", recipe, "--set", "optim.ema=0.99", "--set", "machine.precision=bfloat16")
    assert sheet["memory"]["training"]["average"] == sheet["memory"]["training"]["weights"]
    assert sheet["memory"]["training"]["step"]["matmuls"] == "bfloat16"
    code, _, err = run(capsys, "size", "gpt2", "--set", "optim.ema=0.99")
    assert code == 2
    assert "changes a run file" in err


def test_muon_can_be_sized(capsys):
    _, adamw = run_json(capsys, "size", "gpt2")
    _, muon = run_json(capsys, "size", "gpt2", "--optimizer", "muon")
    one, other = (sheet["memory"]["training"]["optimizer"] for sheet in (adamw, muon))
    assert one - other == 4 * 12 * 12 * 768**2
    assert "momentum for the matrices of the blocks" in run(capsys, "size", "gpt2", "--optimizer", "muon")[1]


def test_the_list_names_every_preset_and_device(capsys):
    code, out, _ = run(capsys, "size", "--list")
    assert code == 0
    assert all(name in out for name in presets.ALL)
    assert "mi300x" in out
    code, result = run_json(capsys, "size", "--list")
    assert code == 0
    assert {row["name"] for row in result["presets"]} == set(presets.ALL)
    for wrong in (["size"], ["size", "gpt2", "--list"], ["size", "--list", "--gpus", "4"]):
        code, out, err = run(capsys, *wrong)
        assert (code, out) == (2, "")
        assert err.startswith("glass: ")


def test_a_plan_costs_what_the_price_says_and_nothing_without_one(capsys):
    asked = "size", "plan", "--model", "gpt2", "--gpu", "rtx4090", "--gpus", "4"
    _, free = run_json(capsys, *asked)
    assert {row["cost"] for row in free["plans"]} == {None}
    _, result = run_json(capsys, *asked, "--price", "0.5")
    assert result["currency"] == "USD"
    assert result["plans"][0]["cost"] == pytest.approx(result["plans"][0]["hours"] * 4 * 0.5)
    assert "cost in USD" in run(capsys, *asked, "--price", "0.5")[1]
    for price in ("0", "-1", "inf", "nan"):
        code, _, err = run(capsys, *asked, "--price", price)
        assert code == 2
        assert "US dollars for one GPU and hour" in err


def test_a_plan_takes_model_and_context_of_a_run_file(capsys):
    recipe = ROOT / "recipes" / "bard.toml"
    _, result = run_json(capsys, "size", "plan", "--model", recipe, "--gpus", 1)
    assert result["plans"][0]["tokens"] == 8 * 256
    assert "1,871,040 parameters" in result["title"]


def every_output():
    subjects = (
        "gpt2", "t5_small --source 64", "mixtral_8x7b --optimizer muon", "plan", "plan --model llama2_7b",
        "plan --model gpt2 --gpu a100-80gb --price 2", "chinchilla --flops 1.2e24", "jl --points 1e12", "--list",
    )  # fmt: skip
    yield from (["size", *subject.split()] for subject in subjects)
    yield from (["size", f"recipes/{path.name}"] for path in RECIPES)
    yield [
        "size",
        "recipes/bard.toml",
        "--set",
        "optim.ema=0.9",
        "--set",
        "machine.precision=bfloat16",
        "--set",
        "machine.device=cuda",
    ]


@pytest.mark.sample(8)
@pytest.mark.parametrize("command", [["env"], *every_output()], ids=" ".join)
def test_in_a_terminal_of_eighty_columns_no_line_is_longer(capsys, monkeypatch, command):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(capsys, *command)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.sample(8)
@pytest.mark.parametrize("command", list(every_output()), ids=" ".join)
def test_no_line_of_a_file_ends_in_blanks(capsys, monkeypatch, command):
    monkeypatch.chdir(ROOT)
    code, out, _ = run(capsys, *command)
    assert code == 0
    assert [line for line in out.splitlines() if line != line.rstrip()] == []
    assert not out.endswith("\n\n")


def test_help_states_units_and_defaults_in_sentences(capsys):
    code, out, _ = run(capsys, "size", "--help")
    assert code == 0
    result = " ".join(out.replace("│", " ").split())
    for words in (
        "Tokens in a sequence. Default: that of the run file", "US dollars for one GPU and hour",
        "Optimizer whose state is counted. Default: adamw, or the optimizer of the run file.",
    ):  # fmt: skip
        assert words in result
