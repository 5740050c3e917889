"""Each choice is one type, and everything that offers it reads that type."""

import ast
import typing
from pathlib import Path

from glassformer.config import MODEL_KINDS, choices
from glassformer.config.optimizer import OPTIMIZERS, OptimizerKind
from glassformer.sizing import BYTES

SOURCE = Path(choices.__file__).parents[1]


def values(choice: typing.Any) -> tuple[str, ...]:
    return typing.get_args(choice)


def test_choices_agree_with_what_implements_them():
    assert values(choices.ModelKind) == tuple(MODEL_KINDS)
    assert set(values(choices.Dtype)) == set(BYTES)
    assert set(values(choices.FloatDtype)) < set(values(choices.Dtype))
    assert set(values(choices.Precision)) - {"auto", "fp8"} < set(values(choices.Dtype))  # fp8: of matmuls on a GPU
    assert set(values(OptimizerKind)) == set(OPTIMIZERS)


def test_no_choice_is_declared_twice():
    """A Literal with the same values anywhere else is a second list, which a new value would miss."""
    declared = {frozenset(values(choice)) for name, choice in vars(choices).items() if typing.get_origin(choice)}
    declared |= {frozenset(values(OptimizerKind))}
    assert len(declared) > 8
    copies = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        text = path.read_text()
        if name in ("config/choices.py", "config/optimizer.py") or "Literal" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
                listed = {item.value for item in ast.walk(node.slice) if isinstance(item, ast.Constant)}
                if listed in declared:
                    copies.append(f"{name}:{node.lineno}")
    assert copies == []
