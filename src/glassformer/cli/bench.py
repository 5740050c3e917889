"""`glass bench`: our speed beside every peer that is installed, in one run, taking turns."""

import json as json_module
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from glassformer.cli.common import Force, InputError, check_writable, refuse_unused

OF_A_RACE = {"against": (), "precision": (), "batch": 1, "prompt": 0, "new": 0, "threads": 0, "model": "gpt2"}
"""Options that mean nothing to `growth`, which has no contenders, as they stand when they are not given."""


def bench(
    task: Annotated[
        tyro.conf.Positional[Literal["decode", "prefill", "train", "startup", "growth"]],
        tyro.conf.arg(
            help="New tokens, a prompt, training steps, the wait for a first token, or how cost grows with length."
        ),
    ],
    against: Annotated[
        tuple[str, ...],
        tyro.conf.arg(
            help="A contender: transformers, ctranslate2, onnxruntime, llama.cpp, nanogpt or gpt-fast. Default: all."
        ),
    ] = (),
    precision: Annotated[
        tuple[str, ...], tyro.conf.arg(help="float32, bfloat16, int8 or int4. Default: all that the task supports.")
    ] = (),
    batch: Annotated[int, tyro.conf.arg(help="Rows that are generated together.")] = 1,
    prompt: Annotated[int, tyro.conf.arg(help="Tokens of a prompt; 0: 32, of prefill 512.")] = 0,
    new: Annotated[int, tyro.conf.arg(help="Tokens added per turn, of train steps; 0: 128, of train 10.")] = 0,
    rounds: Annotated[int, tyro.conf.arg(help="Turns of each contender.")] = 5,
    threads: Annotated[int, tyro.conf.arg(help="Of each contender; 0: one per core.")] = 0,
    nanogpt: Annotated[Path | None, tyro.conf.arg(help="A checkout of nanoGPT.")] = None,
    gpt_fast: Annotated[Path | None, tyro.conf.arg(help="A checkout of gpt-fast.")] = None,
    model: Annotated[str, tyro.conf.arg(help="A preset, with seeded weights, or a model folder.")] = "gpt2",
    json: Annotated[Path | None, tyro.conf.arg(help="Write everything that was measured here.")] = None,
    keep: Annotated[
        Path | None, tyro.conf.arg(help="Folder for the model and its conversions; none: the user's cache.")
    ] = None,
    force: Force = False,
) -> int:
    """Speed beside every installed peer: one process each, taking turns, greedy ids compared. Ctrl-C ends them all."""
    json = None if json is None else json.expanduser()
    if json is not None:
        check_writable("--json", json, force=force)
    if rounds < 1:
        raise InputError(f"--rounds {rounds} must be a whole number of at least 1.")
    if task == "growth":
        others: dict[str, Any] = {"against": against, "precision": precision, "batch": batch, "prompt": prompt}
        others |= {"new": new, "threads": threads, "nanogpt": nanogpt, "gpt_fast": gpt_fast, "model": model}
        refuse_unused("glass bench growth", {**others, "keep": keep}, (), OF_A_RACE)
        return _growth(rounds, json)
    from glassformer.bench.contenders import choose
    from glassformer.bench.plan import Plan

    given = {"nanogpt": nanogpt, "gpt-fast": gpt_fast}
    checkouts = {name: path.expanduser() for name, path in given.items() if path is not None}
    plan = Plan(
        task, tuple(against) or ("all",), tuple(precision), batch, prompt, new, rounds, threads, model, checkouts, keep
    )
    choose(plan)  # a wrong name is told before torch is waited for
    from glassformer.bench.run import run
    from glassformer.bench.show import show
    from glassformer.files import write_atomically

    result = run(plan, _say)
    if json is not None:
        told = {"command": ["glass", *sys.argv[1:]], **result.to_dict()}
        write_atomically(json.resolve(), (json_module.dumps(told, indent=2) + "\n").encode())
    show(result)
    return 0 if result.sound else 1


def _growth(rounds: int, json: Path | None) -> int:
    """Our own engine only: exponents beside those of the theory."""
    from glassformer.bench import growth
    from glassformer.files import write_atomically

    curves = growth.measure(rounds=rounds, say=_say)
    if json is not None:
        told = json_module.dumps([curve.to_dict() for curve in curves], indent=2) + "\n"
        write_atomically(json.resolve(), told.encode())
    print(growth.text(curves))
    return 0


def _say(line: str) -> None:
    """What is going on, for a person who waits: on standard error, so that the table can be piped."""
    print(f"  {line}", file=sys.stderr, flush=True)
