"""Files that start a run: shells accept them, no host is guessed, and two "hosts" train what one process does."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from glassformer.config import ConfigError
from glassformer.training.distributed.launch import Launch, write_launch
from tests.training.distributed.ranks import alone, assert_same, curve, environment, short, where
from tests.training.tiny import corpus

BIG = Launch("my run.toml", "runs/Big Run", nodes=4, gpus=8, hours=1.5, image="registry/glass:1", claim="data")


@pytest.mark.parametrize("scheduler", ["torchrun", "slurm"])
@pytest.mark.parametrize("nodes", [1, 4])
def test_a_shell_accepts_it_and_no_host_is_guessed(scheduler, nodes):
    text = write_launch(Launch("my run.toml", "runs/Big Run", nodes, 8), scheduler)
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "localhost" not in text
    assert "127.0.0.1" not in text
    assert "train 'my run.toml' --out 'runs/Big Run' --resume auto" in text
    assert ("--standalone" in text) is (nodes == 1)
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in text


def test_a_batch_script_ends_jobs_with_a_checkpoint_and_refuses_to_guess():
    text = write_launch(BIG, "slurm")
    for line in (
        "--nodes=4",
        "--gpus-per-node=8",
        "--time=1:30:00",
        "--signal=TERM@120",
        "--requeue",
        "--job-name=big-run",
    ):
        assert f"#SBATCH {line}\n" in text
    bare = {**os.environ, "SLURM_JOB_NODELIST": "", "SLURM_NNODES": "4", "SLURM_JOB_ID": "7"}
    nobody = "scontrol() { :; }; srun() { echo started; }\n" + text
    done = subprocess.run(["bash", "-c", nobody], env=bare, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "scontrol names no host" in done.stderr


def test_without_the_address_of_the_first_host_torchrun_does_not_start():
    bare = {name: value for name, value in os.environ.items() if name != "HEAD"}
    text = "torchrun() { echo started; }\n" + write_launch(BIG, "torchrun")
    done = subprocess.run(["bash", "-c", text], env=bare, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "started" not in done.stdout
    assert "set HEAD to the address of the first host" in done.stderr


def test_a_kubernetes_job_is_yaml_with_one_pod_per_host():
    service, job = yaml.safe_load_all(write_launch(BIG, "kubernetes"))
    assert service["spec"]["clusterIP"] == "None"
    assert (job["spec"]["completions"], job["spec"]["parallelism"], job["spec"]["completionMode"]) == (4, 4, "Indexed")
    pod = job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert "--rdzv-endpoint big-run-0.big-run:29500" in container["args"][0]
    assert {"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"} in container["env"]
    assert pod["terminationGracePeriodSeconds"] == 120
    with pytest.raises(ConfigError, match="needs --image"):
        write_launch(Launch("a.toml", "b"), "kubernetes")
    with pytest.raises(ConfigError, match="hours=0"):
        Launch("a.toml", "b", hours=0)


SRUN = """#!/bin/bash
shift  # --kill-on-bad-exit
"$@" & first=$!
"$@" & second=$!
wait $first && wait $second
"""


@pytest.mark.slow
def test_two_hosts_train_what_one_process_does(tmp_path):
    """A fake srun starts two torchruns here, as SLURM would on two hosts: rank 0 then writes every checkpoint."""
    corpus(tmp_path)
    bin = tmp_path / "bin"
    bin.mkdir()
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/bash\necho localhost\n"}.items():
        (bin / name).write_text(text)
        (bin / name).chmod(0o755)
    changes = short(*where(tmp_path, "hosts"), "machine.parallel=fsdp")
    run = tmp_path / "run.toml"
    run.write_text(toml(changes))
    script = write_launch(Launch(str(run), str(tmp_path / "hosts"), nodes=2, gpus=1), "slurm")
    venv = Path(os.sys.executable).parent
    env = {**environment(), "PATH": f"{bin}:{venv}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "x"}
    env |= {"SLURM_NNODES": "2", "SLURM_JOB_ID": str(os.getpid())}
    script = script.replace(":29500", f":{20000 + os.getpid() % 20000}")
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same(curve(tmp_path / "hosts"), alone(tmp_path, "one"))


def toml(changes: tuple[str, ...]) -> str:
    """A run file with these changes."""
    from glassformer.config import to_toml
    from glassformer.training.run import read_run, run_to_dict

    return to_toml(run_to_dict(read_run("", changes)))
