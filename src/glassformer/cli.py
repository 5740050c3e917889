"""`glass`: verbs to function calls. Parsing and printing only; torch is imported when a verb needs it.

Exit codes: 0 done, 1 a check failed, 2 the input was wrong. Errors a user can cause are one sentence on standard error;
GLASSFORMER_DEBUG=1 shows the traceback instead.
"""

import json as json_module
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from glassformer.config import ModelConfig
    from glassformer.finding import Finding

Json = Annotated[bool, tyro.conf.arg(help="One JSON object on standard output, nothing else.")]


class InputError(ValueError):
    """Input this command line cannot work with."""


# --- size ------------------------------------------------------------------------------------------------------------


def size(
    subject: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(help="A preset, a model folder, a TOML file; or `chinchilla`, or `jl`."),
    ],
    batch: int = 1,
    context: int | None = None,
    dtype: Literal["float64", "float32", "bfloat16", "float16", "int8", "int4"] = "float32",
    optimizer: Literal["adamw", "sgd", "none"] = "adamw",
    flops: Annotated[float | None, tyro.conf.arg(help="chinchilla: training compute C.")] = None,
    params: Annotated[float | None, tyro.conf.arg(help="chinchilla: parameters N instead of C.")] = None,
    tokens: Annotated[float | None, tyro.conf.arg(help="chinchilla: training tokens D instead of C.")] = None,
    points: Annotated[float | None, tyro.conf.arg(help="jl: how many points keep their distances.")] = None,
    eps: Annotated[float, tyro.conf.arg(help="jl: by how much a distance may change.")] = 0.1,
    json: Json = False,
) -> int:
    """Parameters, FLOPs and memory of a model; compute-optimal training; Johnson-Lindenstrauss dimension."""
    from glassformer import size as sizing

    if subject == "chinchilla":
        result: Any = sizing.chinchilla(flops=flops, params=params, tokens=tokens)
    elif subject == "jl":
        if points is None:
            raise InputError("`glass size jl` needs --points: how many points are to keep their distances.")
        result = sizing.johnson_lindenstrauss(points, eps)
    else:
        result = sizing.size(read_config(subject), batch=batch, context=context, dtype=dtype, optimizer=optimizer)
    print(json_module.dumps(result.to_dict()) if json else result.text())
    return 0


def read_config(subject: str) -> "ModelConfig":
    """A config by preset name, folder or TOML file, without building anything."""
    from glassformer import presets
    from glassformer.config import from_toml

    if subject in presets.ALL:
        return presets.get(subject)
    path = Path(subject)
    if path.is_dir():
        from glassformer.weights import load_config

        return load_config(path)
    if path.is_file():
        try:
            return from_toml(path.read_text(encoding="utf-8"), source=subject)
        except UnicodeDecodeError:
            raise InputError(f"{subject} is not text: give a TOML file, a model folder or a preset.") from None
    if path.suffix or os.sep in subject:
        raise InputError(f"{subject} does not exist: give a preset, a model folder or a TOML file.")
    return presets.get(subject)  # refuses, naming the nearest presets


# --- sample ----------------------------------------------------------------------------------------------------------


def sample(
    prompt: Annotated[tyro.conf.Positional[str], tyro.conf.arg(help="Text to continue; with --ids, token ids.")],
    model: Annotated[
        str | None, tyro.conf.arg(help="A folder, or a hub name such as gpt2; none: the bundled bard.")
    ] = None,
    max_new_tokens: Annotated[int | None, tyro.conf.arg(help="64, or what the context holds.")] = None,
    temperature: Annotated[float, tyro.conf.arg(help="0 is greedy.")] = 0.8,
    top_k: int | None = 50,
    top_p: float = 0.95,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    beams: Annotated[int, tyro.conf.arg(help="More than 1: beam search, which does not sample.")] = 1,
    length_penalty: float = 1.0,
    seed: int = 0,
    stop: Annotated[tuple[str, ...], tyro.conf.arg(help="Texts that end the output.")] = (),
    ids: Annotated[bool, tyro.conf.arg(help="The prompt is token ids, and so is the output.")] = False,
    cache: bool = True,
    dtype: Annotated[str | None, tyro.conf.arg(help="float32, bfloat16 or float16; the file's own by default.")] = None,
    json: Json = False,
) -> int:
    """Continue a prompt with a model, token by token."""
    from glassformer.generate import Sampling
    from glassformer.generate.text import Continuation
    from glassformer.weights import load, load_tokenizer

    model = model or "bard"
    # an explicit beam search leaves the sampling defaults unused; greedy and beams share the penalty
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    if beams > 1:
        sampling = Sampling(0.0, repetition_penalty=repetition_penalty)
    loaded = load(model, dtype=dtype)
    if dtype is None and next(loaded.parameters()).dtype.itemsize == 2 and loaded.device.type == "cpu":
        loaded = loaded.float()  # half precisions are for storing and for accelerators: a CPU is slower in them
    job = Continuation(
        model=loaded,
        tokenizer=None if ids else load_tokenizer(model),
        prompt=prompt,
        ids=ids,
        stop=stop,
        max_new_tokens=max_new_tokens,
    )
    if json:
        result = job.run(sampling, beams, length_penalty, seed, cache)
        print(json_module.dumps(result))
    elif beams > 1:
        print(job.run(sampling, beams, length_penalty, seed, cache)["text"])
    else:
        for piece in job.pieces(sampling, seed, cache):
            print(piece, end="", flush=True)
        print()
    return 0


# --- train -----------------------------------------------------------------------------------------------------------


def train(
    run: Annotated[
        tyro.conf.Positional[Path | None], tyro.conf.arg(help="A run file; none: nanoGPT's CPU setting.")
    ] = None,
    set: Annotated[
        tuple[str, ...], tyro.conf.arg(help="Changes to the run, such as optim.lr=3e-4 loop.steps=500.")
    ] = (),
    resume: Annotated[str | None, tyro.conf.arg(help="Go on from a run or a checkpoint.")] = None,
    json: Annotated[bool, tyro.conf.arg(help="Events as JSON lines, the last one the result.")] = False,
) -> int:
    """Train a model on a text. Ctrl-C stops after the step and saves; --resume goes on, bit for bit."""
    from glassformer.train.ranks import said_once

    with said_once():  # under torchrun, by one process
        _train(run, set, resume, json)
    return 0


def _train(run: Path | None, changes: tuple[str, ...], resume: str | None, json: bool) -> None:
    from glassformer.train import open_session, read_run, resume_session
    from glassformer.train import train as run_training
    from glassformer.train.ngram import baselines
    from glassformer.train.ranks import is_main
    from glassformer.train_text import Display, sample_text

    if resume is not None:
        if run is not None:
            raise InputError("a resumed run has its own run file: leave out the run, or leave out --resume.")
        session = resume_session(resume, changes)
    else:
        text = "" if run is None else _read_text(run)
        session = open_session(read_run(text, changes, source=str(run or "the run")))
    arguments = (session.run, session.data)
    try:
        if not is_main():
            group = run_training(*arguments, None, sample_text, session.resume).group
            group.close()
            return
        lines = baselines(session.data.train, session.data.val, session.run.model.vocab_size)
        if json:
            group = run_training(
                *arguments, lambda e: print(json_module.dumps(e), flush=True), sample_text, session.resume, lines
            ).group
        else:
            with Display() as display:
                group = run_training(*arguments, display, sample_text, session.resume, lines).group
            print(f"the best model is in {session.run.out}/best: glass sample --model {session.run.out}/best")
        group.close()
    except ArithmeticError as error:
        raise InputError(str(error)) from None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path} does not exist: give a run file.") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not text: give a TOML run file.") from None


# --- convert ---------------------------------------------------------------------------------------------------------


def convert(
    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SRC")],
    target: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DST")],
    to: Annotated[Literal["hf", "glass"], tyro.conf.arg(help="Hugging Face folder, or our own.")] = "hf",
    dtype: Annotated[str | None, tyro.conf.arg(help="float32, bfloat16 or float16; the file's own by default.")] = None,
    json: Json = False,
) -> int:
    """Write a model in another format, read it back, and compare it with what was read."""
    from glassformer.weights import load, save
    from glassformer.weights.verify import same_logits

    model = load(source, dtype=dtype)
    save(model, target, format=to)
    finding = same_logits(model, load(target))
    notes = getattr(getattr(model, "origin", None), "notes", ())
    report([finding], json, written=str(target), format=to, notes=list(notes))
    return 0 if finding.passed else 1


# --- env -------------------------------------------------------------------------------------------------------------


def env(json: Json = False) -> int:
    """What device and precision would be used here, and why; versions of what matters."""
    import importlib.metadata
    import platform

    import torch

    from glassformer import __version__
    from glassformer.model.device import choose_device

    choice = choose_device()
    names = ("numpy", "safetensors", "tokenizers", "transformers", "huggingface_hub", "triton")
    versions = {"glassformer": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    dtype = str(choice.dtype).removeprefix("torch.")
    if json:
        facts = {"device": choice.device, "dtype": dtype, "why": choice.why, "gflops": choice.gflops}
        print(json_module.dumps({**facts, "versions": versions}))
        return 0
    print(f"device  {choice.device}\ndtype   {dtype}\nwhy     {choice.why}")
    for name, version in versions.items():
        print(f"{name:<16}{version}")
    return 0


# --- tour ------------------------------------------------------------------------------------------------------------


def tour(
    minutes: Annotated[float, tyro.conf.arg(help="Of training; the rest takes about another half minute.")] = 2.0,
    out: Annotated[Path, tyro.conf.arg(help="Folder for report.html and the trained model.")] = Path("tour"),
    json: Json = False,
) -> int:
    """The whole story in minutes: a model learns, speaks, is checked and explained; ends in one HTML page."""
    from glassformer import report as page
    from glassformer import tour as story

    plan = story.Plan(minutes=minutes, out=out)
    try:
        if not json:
            from glassformer.tour_text import print_tour

            return print_tour(plan)
        told = story.walk(plan)
    except ArithmeticError as error:
        raise InputError(str(error)) from None
    path = page.write(told, out / page.NAME)
    print(json_module.dumps({**told.to_dict(), "report": str(path)}))
    return 0 if told.held else 1


def report(findings: Sequence["Finding"], json: bool, **facts: Any) -> None:
    """Findings and facts, for a machine or for a person."""
    if json:
        print(json_module.dumps({"findings": [f.to_dict() for f in findings], **facts}))
        return
    for name, value in facts.items():
        if value:
            print(f"{name}: {value if not isinstance(value, list) else '; '.join(map(str, value))}")
    for finding in findings:
        print(finding.text())


VERBS: dict[str, Callable[..., int]] = {
    "tour": tour,
    "train": train,
    "sample": sample,
    "size": size,
    "convert": convert,
    "env": env,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb. Returns the exit code."""
    try:
        return tyro.extras.subcommand_cli_from_dict(
            VERBS,
            prog="glass",
            description="glassformer: the Transformer you can see through.",
            args=arguments,
        )
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # the reader has gone (`glass ... | head`): say nothing, and keep Python from saying it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        if os.environ.get("GLASSFORMER_DEBUG"):
            raise
        print(f"glass: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
