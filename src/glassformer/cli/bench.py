"""`glass bench`: our speed compared with every installed library, in one run, taking turns."""

import json as json_module
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from glassformer.cli.common import Force, InputError, check_writable, option, refuse_unused

Task = Literal["decode", "prefill", "encode", "train", "startup", "growth"]
OF_A_RACE = {
    **{"against": (), "precision": (), "batch": 0, "prompt": 0, "new": 0, "threads": 0, "model": ""},
    **{"layers": 0, "cpu_time": False, "device": "cpu", "training": False, "sampled": False, "beams": 1},
}
"""Defaults of the options that `growth` does not use: it compares with no other library."""
HELP = {
    "task": "What is measured: tokens per second while decoding, or while reading a prompt; texts per second of an "
    "encoder; training steps or tokens per second; seconds from the start to the first token or to the tenth training "
    "step; or how our own cost grows with length.",
    "against": "Library to compare with: transformers, transformers-compiled, ctranslate2, onnxruntime, llama.cpp, "
    "nanogpt or gpt-fast. Repeat the option for more than one. Default: all that are installed.",
    "precision": "Precisions to measure: float32, bfloat16, int8, int4; on a GPU float32, bfloat16, int8, float8. "
    "Default: all that the task supports; on a GPU bfloat16.",
    "batch": "Number of sequences that are computed together. Default: 1; for encode 32 texts of unequal length, for "
    "training with --model 4.",
    "prompt": "Length of each prompt in tokens; for encode, of the longest text; for training, of each sequence. "
    "Default: 32; prefill 512, encode 128, training 512 or what the model has.",
    "new": "New tokens per round; for train, training steps per round. Default: 128 tokens, 10 steps.",
    "rounds": "Number of rounds. Fewer than 3 cannot show whether other work disturbed them, and judge no target.",
    "threads": "Number of threads of each library. Default: one for each core.",
    "nanogpt": "Folder of a git checkout of nanoGPT. Default: nanoGPT is left out.",
    "gpt_fast": "Folder of a git checkout of gpt-fast. Default: gpt-fast is left out.",
    "model": "Model to run: a preset, which gets seeded random weights, or a model folder. Default: gpt2; for train, "
    "nanoGPT's two settings for a CPU.",
    "device": "Device of every library. Those that are measured on a CPU only are left out on a GPU.",
    "training": "With startup: measure the seconds to the tenth training step, with an empty and with a filled cache "
    "of compiled code, instead of the seconds to the first token.",
    "sampled": "With decode: draw each token with the defaults of `glass sample` (temperature 0.8, top-k 50, "
    "top-p 0.95). Default: the most likely token.",
    "beams": "With decode: number of beams of a beam search, whose whole calls are measured. 1 is greedy.",
    "layers": "Number of layers in place of the preset's, such as 8 of 16. Default: as the preset.",
    "cpu_time": "Measure processor seconds of one thread instead of seconds, for a machine on which other programs "
    "run.",
    "json": "Write everything that was measured to this JSON file. Default: no file.",
    "keep": "Folder in which the model and its conversions are kept. Default: the user's cache folder.",
}


def bench(
    task: Annotated[tyro.conf.Positional[Task], option(HELP["task"])],
    against: Annotated[tuple[str, ...], option(HELP["against"])] = (),
    precision: Annotated[tuple[str, ...], option(HELP["precision"])] = (),
    batch: Annotated[int, option(HELP["batch"])] = 0,
    prompt: Annotated[int, option(HELP["prompt"])] = 0,
    new: Annotated[int, option(HELP["new"])] = 0,
    rounds: Annotated[int, option(HELP["rounds"])] = 5,
    threads: Annotated[int, option(HELP["threads"])] = 0,
    nanogpt: Annotated[Path | None, option(HELP["nanogpt"], "DIR")] = None,
    gpt_fast: Annotated[Path | None, option(HELP["gpt_fast"], "DIR")] = None,
    model: Annotated[str, option(HELP["model"])] = "",
    device: Annotated[Literal["cpu", "cuda"], option(HELP["device"])] = "cpu",
    training: Annotated[bool, option(HELP["training"])] = False,
    sampled: Annotated[bool, option(HELP["sampled"])] = False,
    beams: Annotated[int, option(HELP["beams"])] = 1,
    layers: Annotated[int, option(HELP["layers"])] = 0,
    cpu_time: Annotated[bool, option(HELP["cpu_time"])] = False,
    json: Annotated[Path | None, option(HELP["json"], "FILE")] = None,
    keep: Annotated[Path | None, option(HELP["keep"], "DIR")] = None,
    force: Force = False,
) -> int:
    """Compare our speed with every installed library: one process each, taking turns, greedy tokens compared.

    A figure is printed only if it means something: `-` stands for a median or ratio whose rounds spread by more than
    50 %, and for a share of the memory bandwidth whose fastest rounds do not agree within 10 %. A target is then
    neither reached nor missed, but not measured. Ctrl-C ends all processes.
    """
    json = None if json is None else json.expanduser()
    if json is not None:
        check_writable("--json", json, force=force)
    if rounds < 1:
        raise InputError(f"--rounds {rounds} must be a whole number of at least 1.")
    if task == "growth":
        others: dict[str, Any] = {"against": against, "precision": precision, "batch": batch, "prompt": prompt}
        others |= {"new": new, "threads": threads, "nanogpt": nanogpt, "gpt_fast": gpt_fast, "model": model}
        others |= {"layers": layers, "cpu_time": cpu_time, "device": device, "training": training, "sampled": sampled}
        others |= {"beams": beams}
        refuse_unused("glass bench growth", {**others, "keep": keep}, (), OF_A_RACE)
        return _growth(rounds, json)
    from glassformer.bench.contenders import choose
    from glassformer.bench.plan import Plan

    given = {"nanogpt": nanogpt, "gpt-fast": gpt_fast}
    checkouts = {name: path.expanduser() for name, path in given.items() if path is not None}
    peers = tuple(against) or ("all",)
    sizes = (batch, prompt, new, rounds, threads, model, layers, cpu_time)
    how: dict[str, Any] = {"device": device, "training": training, "sampled": sampled, "beams": beams}
    plan = Plan(task, peers, tuple(precision), *sizes, checkouts, keep, **how)
    choose(plan)  # a wrong name is refused before torch is imported
    from glassformer.bench.run import run
    from glassformer.bench.show import show
    from glassformer.files import write_atomically

    result = run(plan, _say)
    if json is not None:
        data = {"command": ["glass", *sys.argv[1:]], **result.to_dict()}
        write_atomically(json.resolve(), (json_module.dumps(data, indent=2) + "\n").encode())
    show(result)
    return 0 if result.sound else 1


def _growth(rounds: int, json: Path | None) -> int:
    """Measure how the cost of our own engine grows, and compare the exponents with the theory."""
    from glassformer.bench import growth
    from glassformer.files import write_atomically

    curves = growth.measure(rounds=rounds, say=_say)
    if json is not None:
        text = json_module.dumps([curve.to_dict() for curve in curves], indent=2) + "\n"
        write_atomically(json.resolve(), text.encode())
    print(growth.text(curves))
    return 0


def _say(line: str) -> None:
    """Print progress on standard error, so that the table can be piped."""
    print(f"  {line}", file=sys.stderr, flush=True)
