"""Files that start a run on many GPUs: a torchrun command, a SLURM batch script, a Kubernetes job. Nothing is started.

One torchrun per host starts a rank per GPU. Every file sets what restarts need (`--max-restarts`, `--resume auto`, a
new key-value store for each attempt) and lets ranks write a checkpoint when the scheduler ends the job. The address of
the first host comes from the scheduler and is never guessed: with a fallback to localhost every host would train alone.
"""

import json
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from glassformer.config import ConfigError
from glassformer.config.choices import Scheduler
from glassformer.errors import require_positive

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
"""Signals that torchrun passes on to the ranks."""
RESTARTS = 3
GRACE = 120
"""Seconds between the signal that ends a job and its end: ranks finish a step and write a checkpoint."""
PORT = 29500
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "8", "PYTHONUNBUFFERED": "1"}
"""A new key-value store for each restart; threads of a rank on the CPU; output that is not held back."""


@dataclass(frozen=True)
class Launch:
    """A run file, the folder of the run, and the machines to start it on."""

    run: str
    out: str
    nodes: int = 1
    gpus: int = 8
    """GPUs, and so ranks, of each node."""
    hours: float = 24.0
    image: str = ""
    """Container image with glassformer; Kubernetes only."""
    claim: str = ""
    """Persistent volume claim that holds run file, data and output, mounted in every pod; Kubernetes only."""

    def __post_init__(self) -> None:
        require_positive(self, "nodes", "gpus")
        if self.hours <= 0:
            raise ConfigError(f"hours={self.hours} must be positive.")

    @property
    def name(self) -> str:
        """A name for the job, of lower-case letters, digits and dashes."""
        return re.sub(r"[^a-z0-9]+", "-", Path(self.out).name.lower()).strip("-")[:50] or "glassformer"


def write_launch(launch: Launch, scheduler: Scheduler) -> str:
    """Return the command or file for a scheduler."""
    match scheduler:
        case "torchrun":
            return _torchrun_text(launch)
        case "slurm":
            return _slurm(launch)
        case "kubernetes":
            return _kubernetes(launch)
        case _:
            assert_never(scheduler)


def _command(launch: Launch, nodes: str, endpoint: str, identifier: str) -> list[str]:
    """Return the words of torchrun; those that hold variables of the shell are not quoted."""
    place = ["--standalone"]
    if launch.nodes > 1:
        place = [f"--nnodes {nodes}", "--rdzv-backend c10d", f"--rdzv-endpoint {endpoint}", f"--rdzv-id {identifier}"]
    run, out = shlex.quote(launch.run), shlex.quote(launch.out)
    return [
        "torchrun",
        *place,
        f"--nproc-per-node {launch.gpus}",
        f"--max-restarts {RESTARTS}",
        f"--signals-to-handle {SIGNALS}",
        f"--shutdown-timeout {GRACE - 20}",
        f"-m glassformer train {run} --out {out} --resume auto",
    ]


def _lines(words: list[str], indent: str = "    ") -> str:
    return f" \\\n{indent}".join(words)


def _exports() -> str:
    return "\n".join(f"export {name}={value}" for name, value in ENVIRONMENT.items())


def _torchrun_text(launch: Launch) -> str:
    head = "" if launch.nodes == 1 else ': "${HEAD:?set HEAD to the address of the first host, on every host}"\n'
    note = "" if launch.nodes == 1 else f"# run this on each of the {launch.nodes} hosts\n"
    command = _lines(_command(launch, str(launch.nodes), f'"$HEAD:{PORT}"', launch.name))
    return f"#!/bin/bash\n{note}{head}{_exports()}\n{command}\n"


def _slurm(launch: Launch) -> str:
    minutes = max(1, round(60 * launch.hours))
    output = shlex.quote(os.path.join(launch.out, "slurm-%j.log"))
    options = {
        "job-name": launch.name,
        "nodes": launch.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": launch.gpus,
        "time": f"{minutes // 60}:{minutes % 60:02d}:00",
        "signal": f"TERM@{GRACE}",
        "open-mode": "append",
        "output": output,
    }
    head = "\n".join(f"#SBATCH --{name}={value}" for name, value in options.items())
    command = _command(launch, '"$SLURM_NNODES"', f'"$head:{PORT}"', '"$SLURM_JOB_ID"')
    return f"""#!/bin/bash
{head}
#SBATCH --requeue
# SLURM creates the log, but not its folder: mkdir -p {shlex.quote(launch.out)} before sbatch
set -euo pipefail

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
if [ -z "$head" ]; then
    echo "scontrol names no host of this job: the ranks cannot find each other" >&2
    exit 2
fi
{_exports()}

srun --kill-on-bad-exit=1 {_lines(command)}
"""


def _kubernetes(launch: Launch) -> str:
    if not launch.image or not launch.claim:
        raise ConfigError(
            "a Kubernetes job needs --image, a container image with glassformer, and --claim, a volume claim that "
            "holds the run file, the data and the output."
        )
    name = launch.name
    command = " ".join(_command(launch, str(launch.nodes), f"{name}-0.{name}:{PORT}", name))
    environment = "".join(f'\n            - {{name: {key}, value: "{value}"}}' for key, value in ENVIRONMENT.items())
    return f"""apiVersion: v1
kind: Service
metadata: {{name: {name}}}
spec:
  clusterIP: None
  selector: {{job-name: {name}}}
---
apiVersion: batch/v1
kind: Job
metadata: {{name: {name}}}
spec:
  completionMode: Indexed
  completions: {launch.nodes}
  parallelism: {launch.nodes}
  backoffLimit: {RESTARTS * launch.nodes}
  activeDeadlineSeconds: {round(3600 * launch.hours)}
  template:
    spec:
      subdomain: {name}
      restartPolicy: OnFailure
      terminationGracePeriodSeconds: {GRACE}
      containers:
        - name: train
          image: {launch.image}
          workingDir: /data
          command: ["/bin/bash", "-c"]
          args:
            - {json.dumps(f"exec {command}")}
          env:{environment}
          resources:
            limits: {{nvidia.com/gpu: {launch.gpus}}}
          volumeMounts:
            - {{name: data, mountPath: /data}}
            - {{name: shared-memory, mountPath: /dev/shm}}
      volumes:
        - name: data
          persistentVolumeClaim: {{claimName: {launch.claim}}}
        - name: shared-memory
          emptyDir: {{medium: Memory}}
"""
