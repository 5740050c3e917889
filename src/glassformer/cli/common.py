"""What the verbs share: the --json flag, refusing, and printing findings."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import tyro

if TYPE_CHECKING:
    from torch import nn

    from glassformer.finding import Finding

Json = Annotated[bool, tyro.conf.arg(help="One JSON object on standard output, nothing else.")]


class InputError(ValueError):
    """Input this command line cannot work with."""


def refuse_nan(model: "nn.Module", name: str) -> None:
    """Refuse weights that are no numbers: everything computed with them would be none either."""
    from glassformer.weights.verify import not_numbers

    if (told := not_numbers(model)) is not None:
        raise InputError(f"{name}: {told}: copy the weights again, or take an earlier checkpoint.")


def report(findings: Sequence["Finding"], as_json: bool, **facts: Any) -> None:
    """Findings and facts, for a machine or for a person."""
    if as_json:
        print(json.dumps({"findings": [f.to_dict() for f in findings], **facts}))
        return
    for name, value in facts.items():
        if value:
            print(f"{name}: {value if not isinstance(value, list) else '; '.join(map(str, value))}")
    for finding in findings:
        print(finding.text())
