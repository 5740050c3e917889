"""`glass compare`: find the first operation at which two implementations of one model differ."""

import json as json_module
from pathlib import Path
from typing import Annotated, get_args

import tyro

from glassformer.cli.common import Force, InputError, Json, check_writable, option, terminal_width, token_ids, wrapped
from glassformer.config.choices import FloatDtype, ModelKind

HELP = {
    "a": "A model folder, a bundled model such as bard, a hub name, file.py:name or package.module:name (a model, or a "
    "function that builds one).",
    "b": "The other model, given like A. Default: A, if --device-b or --dtype-b says how it differs.",
    "tokens": "Token ids to compare on, such as '5 17 3'. Default: random tokens of several lengths.",
    "vocab_size": "Compare only the first ids, for a vocabulary that is padded in one model. Default: all ids.",
    "kind": "Kind of both models. Default: inferred from the models.",
    "dtype": "Dtype of the first comparison. Default: the dtype of each model.",
    "device_a": "Device of A: cpu, cuda, cuda:1 or mps. Default: the CPU.",
    "device_b": "Device of B, like --device-a; rounding errors are then compared too. Default: the CPU.",
    "dtype_a": "Dtype of A alone. Default: --dtype.",
    "dtype_b": "Dtype of B alone. Default: --dtype.",
    "html": "Also write the report as HTML to this file. Default: do not.",
}


def compare(
    a: Annotated[tyro.conf.Positional[str], option(HELP["a"], "A")],
    b: Annotated[tyro.conf.Positional[str | None], option(HELP["b"], "B")] = None,
    tokens: Annotated[tuple[str, ...], option(HELP["tokens"], "IDS")] = (),
    vocab_size: Annotated[int | None, option(HELP["vocab_size"], "INT")] = None,
    kind: Annotated[ModelKind | None, option(HELP["kind"], "|".join(get_args(ModelKind)))] = None,
    dtype: Annotated[FloatDtype | None, option(HELP["dtype"], "|".join(get_args(FloatDtype)))] = None,
    device_a: Annotated[str | None, option(HELP["device_a"], "DEVICE")] = None,
    device_b: Annotated[str | None, option(HELP["device_b"], "DEVICE")] = None,
    dtype_a: Annotated[FloatDtype | None, option(HELP["dtype_a"], "|".join(get_args(FloatDtype)))] = None,
    dtype_b: Annotated[FloatDtype | None, option(HELP["dtype_b"], "|".join(get_args(FloatDtype)))] = None,
    html: Annotated[Path | None, option(HELP["html"], "FILE")] = None,
    force: Force = False,
    json: Json = False,
) -> int:
    """Compare two implementations of one model. Exit 0: same (within rounding), 1: different, 2: not comparable."""
    if vocab_size is not None and vocab_size < 2:
        raise InputError(f"--vocab-size {vocab_size} must be at least 2.")
    if html is not None:
        check_writable("--html", html, suffixes=(".html", ".htm"), force=force)
    ids = token_ids("--tokens", tokens)
    from glassformer.doctor.compare.page import write
    from glassformer.doctor.compare.run import compare as side_by_side
    from glassformer.doctor.load import resolve
    from glassformer.doctor.subject.device import find_device

    for device in (device_a, device_b):
        if device is not None:
            find_device(device)
    if b is None and (device_a, dtype_a) == (device_b, dtype_b):
        raise InputError("compare needs two models, or one with --device-b or --dtype-b: give B as well.")
    b = a if b is None else b
    one = resolve(a, as_stored=True)[0]
    two = one if a == b else resolve(b, as_stored=True)[0]
    devices = None if device_a is None and device_b is None else (device_a, device_b)
    dtypes = (dtype_a or dtype, dtype_b or dtype)
    result = side_by_side(one, two, ids or None, vocab_size, kind, dtypes, (a, b), devices)
    if html is not None:
        write(result, html)
    if json:
        print(json_module.dumps({**result.to_dict(), **({"html": str(html)} if html else {})}))
    else:
        print(wrapped(result.text(), terminal_width()))
        if html is not None:
            print(f"The report was written to {html}.")
    return 0 if result.same else 1
