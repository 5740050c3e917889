"""`glass size`: what a model costs, compute-optimal training, plans for many GPUs, Johnson-Lindenstrauss."""

import json as json_module
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from glassformer.cli.common import InputError, Json, refuse_unused, terminal_width

if TYPE_CHECKING:
    from glassformer.config import ModelConfig

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
    from glassformer import sizing

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
    from glassformer.config import from_toml, presets

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
