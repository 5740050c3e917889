"""`glass launch`: write the command, SLURM script or Kubernetes job that starts a run on many GPUs."""

import json as json_module
from pathlib import Path
from typing import Annotated

import tyro

from glassformer.cli.common import Force, InputError, Json, check_writable, option
from glassformer.config.choices import Scheduler

HELP = {
    "scheduler": "What starts the processes: a shell script with torchrun, a SLURM batch script, or a Kubernetes job.",
    "run": "The run file, as every node sees it.",
    "nodes": "Number of hosts.",
    "gpus": "GPUs of each host: one process per GPU.",
    "out": "Folder of the run, on a file system that all hosts share. Default: the run file's `out`.",
    "hours": "Time limit of the job.",
    "image": "Container image with glassformer. Required by kubernetes.",
    "claim": "Persistent volume claim that holds the run file, the data and the output. Required by kubernetes.",
    "to": "Write to this file. Default: print.",
}


def launch(
    scheduler: Annotated[tyro.conf.Positional[Scheduler], option(HELP["scheduler"])],
    run: Annotated[tyro.conf.Positional[Path], option(HELP["run"], "RUN.toml")],
    nodes: Annotated[int, option(HELP["nodes"])] = 1,
    gpus: Annotated[int, option(HELP["gpus"])] = 8,
    out: Annotated[str | None, option(HELP["out"], "DIR")] = None,
    hours: Annotated[float, option(HELP["hours"])] = 24.0,
    image: Annotated[str | None, option(HELP["image"], "IMAGE")] = None,
    claim: Annotated[str | None, option(HELP["claim"], "NAME")] = None,
    to: Annotated[Path | None, option(HELP["to"], "FILE")] = None,
    force: Force = False,
    json: Json = False,
) -> int:
    """Write what starts a run on many GPUs. The run is checked against the number of ranks; nothing is started."""
    from glassformer.files import write_atomically
    from glassformer.training.distributed.group import check
    from glassformer.training.distributed.launch import Launch, write_launch
    from glassformer.training.run import read_run
    from glassformer.training.session import read_run_file

    text = read_run_file(run)
    if text is None:
        raise InputError(f"{run} is not a run file: give a TOML file, as `glass train` takes it.")
    read = read_run(text, source=str(run))
    folder = out or read.out
    if not folder:
        raise InputError(f"{run} does not name the folder of the run, which all hosts must share: add --out DIR.")
    made = Launch(str(run), folder, nodes, gpus, hours, image or "", claim or "")
    check(read, nodes * gpus)
    if read.machine.tensor > gpus:
        raise InputError(f"machine.tensor={read.machine.tensor} is more than the {gpus} GPUs of a host: use fewer.")
    written = write_launch(made, scheduler)
    if to is not None:
        check_writable("--to", to, force=force)
        write_atomically(to, written.encode())
    if json:
        print(json_module.dumps({"scheduler": scheduler, "ranks": nodes * gpus, "out": folder, "text": written}))
    elif to is None:
        print(written, end="")
    else:
        print(f"wrote {to}: {nodes} x {gpus} ranks")
    return 0
