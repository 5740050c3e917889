"""`glass size`, `sample`, `convert`, `env`: models as they are."""

import json as json_module
import math
import os
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from glassformer.cli.common import (
    InputError,
    Json,
    check_seed,
    check_writable,
    refuse_nan,
    refuse_unused,
    report,
    terminal_width,
)

if TYPE_CHECKING:
    from glassformer.config import ModelConfig
    from glassformer.generate import Sampling
    from glassformer.generate.speculate import Draft
    from glassformer.generate.text import Continuation
    from glassformer.model import Model


SIZES = {
    "a model": ("batch", "context", "dtype", "optimizer"),
    "chinchilla": ("flops", "params", "tokens"),
    "jl": ("points", "eps"),
    "plan": ("batch", "context", "tokens", "model", "gpus", "gpu"),
    "plan without --model": ("batch", "context", "tokens", "gpu"),
}
"""What `glass size` is about -> the options that mean something to it."""


def size(
    subject: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(metavar="SUBJECT", help="A preset, a model folder, a TOML file; or `chinchilla`, `jl`, `plan`."),
    ],
    batch: Annotated[int | None, tyro.conf.arg(help="1; plan: 8 on each device.")] = None,
    context: int | None = None,
    dtype: Literal["float64", "float32", "bfloat16", "float16", "int8", "int4"] = "float32",
    optimizer: Literal["adamw", "sgd", "none"] = "adamw",
    flops: Annotated[float | None, tyro.conf.arg(help="chinchilla: training compute C.")] = None,
    params: Annotated[float | None, tyro.conf.arg(help="chinchilla: parameters N instead of C.")] = None,
    tokens: Annotated[
        float | None, tyro.conf.arg(help="chinchilla: training tokens D instead of C; plan: D, 20·N.")
    ] = None,
    points: Annotated[float | None, tyro.conf.arg(help="jl: how many points keep their distances.")] = None,
    eps: Annotated[float, tyro.conf.arg(help="jl: by how much a distance may change.")] = 0.1,
    model: Annotated[str | None, tyro.conf.arg(help="plan: a preset, a folder or a TOML file; none: a ladder.")] = None,
    gpus: Annotated[int, tyro.conf.arg(help="plan: how many devices.")] = 8,
    gpu: Annotated[str, tyro.conf.arg(help="plan: h200, or a TOML file with measured rates.")] = "h200",
    json: Json = False,
) -> int:
    """Parameters, FLOPs and memory of a model; compute-optimal training; training on many GPUs; JL dimension."""
    from glassformer import size as sizing

    given: dict[str, Any] = {"batch": batch, "context": context, "dtype": dtype, "optimizer": optimizer, "eps": eps}
    given |= {"flops": flops, "params": params, "tokens": tokens, "points": points, "model": model, "gpus": gpus}
    given["gpu"] = gpu
    defaults = {"dtype": "float32", "optimizer": "adamw", "eps": 0.1, "gpus": 8, "gpu": "h200"}
    what = subject if subject in ("chinchilla", "jl", "plan") else "a model"
    what = "plan without --model" if what == "plan" and model is None else what
    refuse_unused(f"glass size {subject if what == 'a model' else what}", given, SIZES[what], defaults)
    if subject == "chinchilla":
        result: Any = sizing.chinchilla(flops=flops, params=params, tokens=tokens)
    elif subject == "jl":
        if points is None:
            raise InputError("`glass size jl` needs --points: how many points are to keep their distances.")
        result = sizing.johnson_lindenstrauss(points, eps)
    elif subject == "plan":
        device, each = sizing.device(gpu), 8 if batch is None else batch
        if model is None:
            ladder = {name: read_config(name) for name in sizing.LADDER}
            result = sizing.plan_ladder(ladder, device, each, context, tokens)
        else:
            result = sizing.plan_model(read_config(model), model, gpus, device, each, context, tokens)
    else:
        result = sizing.size(
            read_config(subject), batch=1 if batch is None else batch, context=context, dtype=dtype, optimizer=optimizer
        )
    if json:
        print(json_module.dumps(result.to_dict()))
    else:
        print(result.text(terminal_width()))
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


def sample(
    prompt: Annotated[
        tyro.conf.Positional[str], tyro.conf.arg(metavar="PROMPT", help="Text to continue; with --ids, token ids.")
    ],
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
    draft: Annotated[
        str | None, tyro.conf.arg(help="A smaller model's folder, or lookup: proposes tokens, which the model judges.")
    ] = None,
    draft_tokens: Annotated[int, tyro.conf.arg(help="How many it proposes at a time.")] = 4,
    dtype: Annotated[str | None, tyro.conf.arg(help="float32, bfloat16 or float16; the file's own by default.")] = None,
    json: Json = False,
) -> int:
    """Continue a prompt with a model, token by token."""
    check_seed(seed)
    _check_search(beams, length_penalty, draft, draft_tokens)
    from glassformer.generate.text import Continuation
    from glassformer.weights import load_tokenizer

    sampling = _sampling(beams, temperature, top_k, top_p, min_p, repetition_penalty)
    model = model or "bard"
    loaded = _load_to_sample(model, dtype)
    tokenizer = None if ids else load_tokenizer(model)
    job = Continuation(
        model=loaded,
        tokenizer=tokenizer,
        prompt=prompt,
        ids=ids,
        stop=stop,
        max_new_tokens=max_new_tokens,
        draft=None if draft is None else _read_draft(draft, dtype, model, tokenizer),
        draft_tokens=draft_tokens,
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
    if not json:
        _tell_draft(job)
    return 0


def _check_search(beams: int, length_penalty: float, draft: str | None, draft_tokens: int) -> None:
    if beams < 1:
        raise InputError(f"--beams {beams} must be at least 1, which samples; 4 is a usual search.")
    if not math.isfinite(length_penalty):
        raise InputError(f"--length-penalty {length_penalty} must be a finite number; 1 is the usual one.")
    if beams == 1:
        given = {"length_penalty": length_penalty}
        refuse_unused("glass sample without --beams", given, (), {"length_penalty": 1.0})
    if draft is None:
        refuse_unused("glass sample without --draft", {"draft_tokens": draft_tokens}, (), {"draft_tokens": 4})


def _sampling(
    beams: int, temperature: float, top_k: int | None, top_p: float, min_p: float, penalty: float
) -> "Sampling":
    """A beam search leaves the sampling defaults unused; greedy and beams share the penalty."""
    from glassformer.generate import Sampling

    sampling = Sampling(temperature, top_k, top_p, min_p, penalty)
    return Sampling(0.0, repetition_penalty=penalty) if beams > 1 else sampling


def _tell_draft(job: "Continuation") -> None:
    """What became of the proposals of a draft, where there was one."""
    if (was := job.acceptance) is not None:
        accepted = f"{was.accepted} of {was.proposed} proposed tokens accepted ({was.rate:.0%})"
        print(f"draft: {accepted}; {len(job.new)} tokens in {was.passes} passes of the model", file=sys.stderr)


def _load_to_sample(source: str, dtype: str | None) -> "Model":
    from glassformer.weights import load

    loaded = load(source, dtype=dtype)
    refuse_nan(loaded, source)
    if dtype is None and next(loaded.parameters()).dtype.itemsize == 2 and loaded.device.type == "cpu":
        loaded = loaded.float()  # half precisions are for storing and for accelerators: a CPU is slower in them
    return loaded


def _read_draft(source: str, dtype: str | None, model: str, tokenizer: Any) -> "Draft":
    """A draft whose ids mean what the model's mean."""
    from glassformer.model import DecoderLM
    from glassformer.weights import load_tokenizer

    if source == "lookup":
        return "lookup"
    draft = _load_to_sample(source, dtype)
    if not isinstance(draft, DecoderLM):
        raise InputError(f"the draft {source} is not a decoder-only model: give one, or `lookup`.")
    theirs = None if tokenizer is None else load_tokenizer(source)
    if theirs is not None:
        ours, known = tokenizer.get_vocab(), theirs.get_vocab()
        apart = sorted(token for token in ours.keys() | known.keys() if ours.get(token) != known.get(token))
        if apart:
            raise InputError(
                f"the ids of {apart[0]!r} are {known.get(apart[0], 'none')} in the draft {source} and "
                f"{ours.get(apart[0], 'none')} in the model {model}: they must share one vocabulary."
            )
    return draft


def convert(
    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SRC", help="A folder or a hub name.")],
    target: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DST", help="The folder to write.")],
    to: Annotated[Literal["hf", "glass"], tyro.conf.arg(help="Hugging Face folder, or our own.")] = "hf",
    dtype: Annotated[str | None, tyro.conf.arg(help="float32, bfloat16 or float16; the file's own by default.")] = None,
    json: Json = False,
) -> int:
    """Write a model in another format, read it back, and compare it with what was read."""
    if not target.is_dir():
        check_writable("DST", target, makes_folders=True)
    from glassformer.weights import load, save
    from glassformer.weights.export import free_target
    from glassformer.weights.verify import same_logits

    free_target(target)  # before a large model is read for nothing
    model = load(source, dtype=dtype)
    refuse_nan(model, source)
    save(model, target, format=to)
    finding = same_logits(model, load(target))
    notes = getattr(getattr(model, "origin", None), "notes", ())
    report([finding], json, written=str(target), format=to, notes=list(notes))
    return 0 if finding.passed else 1


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
    why = "\n        ".join(textwrap.wrap(choice.why, (terminal_width() or 10_000) - 8))
    print(f"device  {choice.device}\ndtype   {dtype}\nwhy     {why}")
    for name, version in versions.items():
        print(f"{name:<16}{version}")
    return 0
