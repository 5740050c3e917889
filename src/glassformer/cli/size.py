"""`glass size`: what a model costs, compute-optimal training, plans for many GPUs, Johnson-Lindenstrauss."""

import dataclasses
import json as json_module
from typing import Annotated, Any, get_args

import tyro

from glassformer.cli.common import InputError, Json, option, refuse_unused, terminal_width
from glassformer.config.choices import Dtype
from glassformer.config.optimizer import SizedOptimizer as Optimizer

SIZES = {
    "a model": ("batch", "context", "source", "dtype", "optimizer", "set"),
    "chinchilla": ("flops", "params", "tokens"),
    "jl": ("points", "eps"),
    "plan": ("batch", "context", "tokens", "model", "gpus", "gpu", "price"),
    "plan without --model": ("batch", "context", "tokens", "gpu", "price"),
    "--list": (),
}
"""What `glass size` is asked for -> the options that it uses."""
DEFAULTS = {"set": (), "eps": 0.1, "gpus": 8, "gpu": "h200"}
HELP = {
    "subject": "What to size: a preset, a model folder, a bundled model such as bard, a hub name, a run file or a "
    "model config (both TOML); or `chinchilla`, `jl` or `plan`. Required without --list.",
    "batch": "Sequences in a batch. Default: 1, or the batch of the run file. For plan: per GPU, 8.",
    "context": "Tokens in a sequence. Default: that of the run file, or the model's max_len, or 512 if it has none.",
    "source": "Tokens of the encoder's input, for an encoder-decoder only. Default: the context.",
    "dtype": "Dtype of weights, activations and gradients; int8 and int4 apply to weights only. Default: float32, or "
    "what the run file trains in.",
    "optimizer": "Optimizer whose state is counted. Default: adamw, or the optimizer of the run file.",
    "set": "For a run file: changes as in `glass train`, such as machine.precision=bfloat16. Default: no changes.",
    "flops": "For chinchilla: the training compute C, in floating-point operations. Default: derived from --params or "
    "--tokens.",
    "params": "For chinchilla: the number of parameters N, instead of C. Default: derived from C.",
    "tokens": "For chinchilla: the number of training tokens D, instead of C. For plan: the training tokens; default: "
    "20 for each active parameter.",
    "points": "For jl, which requires it: the number of points whose distances are preserved.",
    "eps": "For jl: the largest relative change of a distance, between 0 and 1.",
    "model": "For plan: a model, given like SUBJECT. Default: four presets on 1 to 1,024 GPUs.",
    "gpus": "For plan with --model: the number of GPUs.",
    "gpu": "For plan: a GPU by name (`--list` prints them), or a TOML file with the rates of one.",
    "price": "For plan: US dollars for one GPU and hour. Default: that of the TOML file, or no cost.",
    "list": "Print all presets and all GPUs with their figures, and nothing else.",
}


def size(
    subject: Annotated[tyro.conf.Positional[str | None], option(HELP["subject"], "SUBJECT")] = None,
    batch: Annotated[int | None, option(HELP["batch"], "INT")] = None,
    context: Annotated[int | None, option(HELP["context"], "INT")] = None,
    source: Annotated[int | None, option(HELP["source"], "INT")] = None,
    dtype: Annotated[Dtype | None, option(HELP["dtype"], "|".join(get_args(Dtype)))] = None,
    optimizer: Annotated[Optimizer | None, option(HELP["optimizer"], "|".join(get_args(Optimizer)))] = None,
    set: Annotated[tuple[str, ...], option(HELP["set"], "SECTION.FIELD=VALUE")] = (),
    flops: Annotated[float | None, option(HELP["flops"], "FLOAT")] = None,
    params: Annotated[float | None, option(HELP["params"], "FLOAT")] = None,
    tokens: Annotated[float | None, option(HELP["tokens"], "FLOAT")] = None,
    points: Annotated[float | None, option(HELP["points"], "FLOAT")] = None,
    eps: Annotated[float, option(HELP["eps"])] = 0.1,
    model: Annotated[str | None, option(HELP["model"], "MODEL")] = None,
    gpus: Annotated[int, option(HELP["gpus"])] = 8,
    gpu: Annotated[str, option(HELP["gpu"])] = "h200",
    price: Annotated[float | None, option(HELP["price"], "USD")] = None,
    list: Annotated[bool, option(HELP["list"])] = False,
    json: Json = False,
) -> int:
    """Print parameters, FLOPs and memory of a model or a run; compute-optimal training; plans for many GPUs."""
    given: dict[str, Any] = {"batch": batch, "context": context, "source": source, "dtype": dtype}
    given |= {"optimizer": optimizer, "set": set, "flops": flops, "params": params, "tokens": tokens, "points": points}
    given |= {"eps": eps, "model": model, "gpus": gpus, "gpu": gpu, "price": price}
    if list == (subject is not None):
        raise InputError("give one SUBJECT, such as gpt2 or a run file; `glass size --list` takes none.")
    what = "--list" if subject is None else subject if subject in ("chinchilla", "jl", "plan") else "a model"
    what = "plan without --model" if what == "plan" and model is None else what
    refuse_unused(f"glass size {subject if what == 'a model' else what}", given, SIZES[what], DEFAULTS)
    result = _result(subject, given)
    print(json_module.dumps(result.to_dict()) if json else result.text(terminal_width()).rstrip("\n"))
    return 0


def _result(subject: str | None, given: dict[str, Any]) -> Any:
    """Return what is printed: it has `text(width)` and `to_dict()`."""
    from glassformer import sizing
    from glassformer.training import size as size_subject

    match subject:
        case None:
            return sizing.Catalogue()
        case "chinchilla":
            return sizing.chinchilla(**{name: given[name] for name in SIZES["chinchilla"]})
        case "jl":
            if given["points"] is None:
                raise InputError("`glass size jl` needs --points: the number of points whose distances are preserved.")
            return sizing.johnson_lindenstrauss(given["points"], given["eps"])
        case "plan":
            return _plan(given)
        case _:
            wanted = {name: given[name] for name in SIZES["a model"] if name != "set"}
            return size_subject.size(subject, **wanted, changes=given["set"])


def _plan(given: dict[str, Any]) -> Any:
    from glassformer import sizing
    from glassformer.config import presets
    from glassformer.training.size import config_of, resolve

    device, price = sizing.device(given["gpu"]), given["price"]
    if price is not None:
        if not 0 < price < float("inf"):
            raise InputError(f"--price {price:g} must be a positive number: US dollars for one GPU and hour.")
        device = dataclasses.replace(device, price=price)
    each = 8 if given["batch"] is None else given["batch"]
    name, context, tokens = given["model"], given["context"], given["tokens"]
    if name is None:
        return sizing.plan_ladder({n: presets.get(n) for n in sizing.LADDER}, device, each, context, tokens)
    if context is None:
        context = getattr(resolve(name), "context", None)  # of a run
    return sizing.plan_model(config_of(name), name, given["gpus"], device, each, context, tokens)
