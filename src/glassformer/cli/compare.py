"""`glass compare`: find the first operation at which two implementations of one model differ."""

import json as json_module
from pathlib import Path
from typing import Annotated

import tyro

from glassformer.cli.common import Force, InputError, Json, check_writable, terminal_width, token_ids, wrapped
from glassformer.config.choices import FloatDtype, ModelKind


def compare(
    a: Annotated[
        tyro.conf.Positional[str], tyro.conf.arg(metavar="A", help="A folder, file.py:name or package.module:name.")
    ],
    b: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(metavar="B", help="Like A. A name is a model or builds one."),
    ],
    tokens: Annotated[
        tuple[str, ...],
        tyro.conf.arg(
            help="Token ids to compare on, such as '5 17 3'. Default: random tokens of several lengths.", metavar="IDS"
        ),
    ] = (),
    vocab_size: Annotated[
        int | None, tyro.conf.arg(help="Compare only the first N ids, where one vocabulary is padded.")
    ] = None,
    kind: Annotated[
        ModelKind | None,
        tyro.conf.arg(help="Kind of both models. Default: inferred."),
    ] = None,
    dtype: Annotated[
        FloatDtype | None,
        tyro.conf.arg(help="Dtype of the first comparison. Default: the dtype of each model."),
    ] = None,
    html: Annotated[Path | None, tyro.conf.arg(help="Also write the report to this file as an HTML page.")] = None,
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

    one, two = resolve(a)[0], resolve(b)[0]
    result = side_by_side(one, two, tokens=ids or None, vocab_size=vocab_size, kind=kind, dtype=dtype, names=(a, b))
    if html is not None:
        write(result, html)
    if json:
        print(json_module.dumps({**result.to_dict(), **({"html": str(html)} if html else {})}))
    else:
        print(wrapped(result.text(), terminal_width()))
        if html is not None:
            print(f"The report was written to {html}.")
    return 0 if result.same else 1
