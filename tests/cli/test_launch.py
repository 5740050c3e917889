"""`glass launch` as a user meets it."""

import pytest

from tests.cli.asking import run, run_json

FILE = """out = "runs/big"
[machine]
parallel = "fsdp"
tensor = 2
[loop]
batch = 16
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(FILE)
    return path


def test_a_file_is_printed_or_written(capsys, tmp_path, file):
    code, out, _ = run(capsys, "launch", "slurm", file, "--nodes", 2, "--gpus", 4)
    assert code == 0
    assert "#SBATCH --nodes=2" in out
    assert f"train {file} --out runs/big --resume auto" in out
    target = tmp_path / "job.sh"
    assert run(capsys, "launch", "slurm", file, "--nodes", 2, "--gpus", 4, "--to", target)[0] == 0
    assert target.read_text() == out
    code, _, err = run(capsys, "launch", "slurm", file, "--nodes", 2, "--gpus", 4, "--to", target)
    assert code == 2
    assert "already exists: pass --force" in err
    code, result = run_json(capsys, "launch", "torchrun", file, "--gpus", 4, "--out", "elsewhere")
    assert (code, result["ranks"], result["out"]) == (0, 4, "elsewhere")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--gpus", "3"), "machine.tensor=2 does not divide 3 ranks"),
        (("--nodes", "5", "--gpus", "4"), "loop.batch=16 is not a multiple of 10 ranks"),
        (("--nodes", "4", "--gpus", "1"), "more than the 1 GPUs of a host"),
        (("--nodes", "0"), "must be a whole number of at least 1"),
    ],
)
def test_a_layout_that_does_not_fit_is_one_sentence(capsys, file, words, sentence):
    code, out, err = run(capsys, "launch", "torchrun", file, *words)
    assert (code, out) == (2, "")
    assert sentence in err
    assert len(err.strip().splitlines()) == 1


def test_what_is_no_run_file_is_refused(capsys, tmp_path, file):
    text = tmp_path / "text.txt"
    text.write_text("a text")
    assert "is not a run file" in run(capsys, "launch", "slurm", text)[2]
    file.write_text("seed = 1")
    assert "add --out DIR" in run(capsys, "launch", "slurm", file)[2]
