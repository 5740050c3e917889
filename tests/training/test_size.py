"""`gf.size` does what was meant: presets, folders, run files, configs, runs and models."""

import subprocess
import sys
from pathlib import Path

import pytest

import glassformer as gf
from glassformer import sizing
from glassformer.config import ConfigError, to_dict, to_toml
from glassformer.training.run import SECTIONS, Run, read_run
from glassformer.training.size import RUN_KEYS, config_of, resolve
from tests import folders

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.toml"))
OWN_TABLES = """
[model]
vocab_size = 65
d_model = 32
n_layers = 2
max_len = 16

[model.attention]
n_heads = 4

[model.feedforward]
kind = "gated"
d_ff = 48

[optim]
kind = "muon"

[loop]
batch = 6
"""
PRESET_CHANGED = """
[model]
preset = "nano"
n_layers = 3

[model.position]
kind = "rotary"

[optim]
ema = 0.99
"""


def test_a_preset_by_name_is_the_preset():
    assert gf.size("gpt2") == gf.size(gf.presets.gpt2())
    assert gf.size("GPT2-medium", batch=2).parameters == 354_823_168
    with pytest.raises(ConfigError, match=r"'gtp2' is not a preset\. Did you mean .*gpt2"):
        gf.size("gtp2")


def test_a_model_is_sized_by_its_config():
    model = gf.build("nano")
    assert gf.size(model) == gf.size("nano")
    assert gf.size(model).parameters == sum(p.numel() for p in model.parameters())


def test_building_a_preset_by_name():
    assert gf.build("nano").config == gf.presets.nano()
    with pytest.raises(ConfigError, match=r"'nanno' is not a preset\. Did you mean nano"):
        gf.build("nanno")


@pytest.mark.parametrize("subject", [3, None, {"d_model": 4}, [1], object()])
def test_another_type_is_one_sentence_that_names_what_is_accepted(subject):
    with pytest.raises(TypeError, match=r"takes a ModelConfig, a run, a model .* a preset, a model folder or a TOML"):
        gf.size(subject)
    with pytest.raises(TypeError, match=r"sizing\.size takes a ModelConfig, not"):
        sizing.size(subject)


def test_a_folder_and_a_model_config_in_a_file(tmp_path):
    folder = folders.write(tmp_path / "model")
    assert gf.size(folder) == gf.size(str(folder)) == gf.size(folder / "model.toml") == gf.size(gf.load(folder))
    (tmp_path / "own.toml").write_text(to_toml(to_dict(gf.presets.llama_tiny())))
    assert gf.size(str(tmp_path / "own.toml")) == gf.size("llama_tiny")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_can_be_sized_with_its_own_values(path):
    run, found = read_run(path.read_text()), gf.size(path)
    assert (found.batch, found.context, found.optimizer) == (run.loop.batch, run.context, run.optim.kind)
    assert found.notes[0].startswith(f"From {path}: batch {run.loop.batch:,}")
    assert found.training is not None
    assert found.training.peak > 0
    assert resolve(path) == run


@pytest.mark.parametrize("text", [OWN_TABLES, PRESET_CHANGED, "[model]\npreset = 'nano'", "", "seed = 3"])
def test_a_run_file_is_read_as_training_reads_it(text, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(text)
    run = read_run(text)
    assert resolve(path) == run
    found = gf.size(path)
    assert found.config == config_of(path) == config_of(run)
    assert (found.batch, found.optimizer) == (run.loop.batch, run.optim.kind)
    assert (found.training.average > 0) == (run.optim.ema is not None)
    assert gf.size(run).training == found.training


def test_explicit_arguments_win(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(OWN_TABLES)
    found = gf.size(path, batch=2, context=8, optimizer="adamw", dtype="bfloat16")
    assert (found.batch, found.context, found.optimizer, found.dtype) == (2, 8, "adamw", "bfloat16")
    assert found.notes == ()


def test_changes_reach_the_run_file_and_nothing_else(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(OWN_TABLES)
    assert gf.size(path, changes=("loop.batch=3", "machine.precision=bfloat16")).options.matmuls == "bfloat16"
    for subject in ("gpt2", read_run("")):
        with pytest.raises(ConfigError, match=r"'loop.batch=3' changes a run file"):
            gf.size(subject, changes=("loop.batch=3",))


def test_mistakes_in_a_run_file_are_those_that_training_reports(tmp_path):
    path = tmp_path / "run.toml"
    for text, words in (
        ("[optm]\nlr = 1\n[loop]\nbatch = 2", "optm is not a part of a run"),
        ("x = ", "readable TOML"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            gf.size(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not text"):
        gf.size(path)
    with pytest.raises(ConfigError, match="does not exist"):
        gf.size(tmp_path / "nowhere.toml")


def test_the_keys_of_a_run_are_known():
    assert {*SECTIONS, "model", "task", "seed", "out"} == RUN_KEYS
    assert not RUN_KEYS & set(to_dict(gf.presets.gpt2()))
    assert isinstance(resolve(read_run("")), Run)


def test_sizing_a_preset_does_not_import_torch():
    code = "import glassformer as gf, sys; gf.size('gpt2'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
