"""Each layer has weights of its own and runs once. The same matrix at two depths is a design only where it is declared.

`nn.ModuleList([Block()] * n)`, a shallow copy, or a loop with the wrong index make layers share their weights, and the
model trains, a little worse. The probe looks for matrices that two matmuls use, one of which depends on the other.

Assumption: the number of layers is declared. Not judged: sharing that the config declares, a loop over a single layer
that is in no list (a Universal Transformer), a list run again and again until the declared depth is reached, recurrence
over time, and a matrix used the other way round (tied projections).
"""

import re
from dataclasses import dataclass
from typing import Any

from glassformer.anatomy.record import Node, ancestors
from glassformer.doctor.probes.structure.recording import Recording
from glassformer.doctor.subject.subject import Subject
from glassformer.finding import Finding, Verdict

ID = "layer_reuse/weights"
SHARING = ("share", "sharing", "recur", "loop", "repeat", "universal", "hidden_group", "cycle", "iterat", "reuse",
           "mem_block", "ponder", "tie_layer", "tied_layer", "tie_encoder_decoder")  # fmt: skip
OTHER_SHARING = ("embed", "expert", "norm", "vocab", "kv", "head", "key_value", "bias")
"""Words of fields that speak of something else that is shared."""

Matrix = tuple[int, int, tuple[int, ...]]
"""Storage, offset in it, and strides: a matrix as a matmul reads it."""


@dataclass
class Reuse:
    """A matrix, and how many matmuls use it one after the other."""

    names: list[str]
    matrix: Matrix
    depth: int
    sliced: bool
    """Whether it is a part of a parameter, such as one layer of stacked weights."""


def declared_sharing(raw: dict[str, Any]) -> str | None:
    """The field of a config that declares layers which run several times; None if there is none."""
    for name, value in raw.items():
        word = any(w in name.lower() for w in SHARING) and not any(w in name.lower() for w in OTHER_SHARING)
        if word and (value is True or (value and value != 1)):
            return name
    return None


def uses(recording: Recording) -> dict[Matrix, list[Node]]:
    """Every matrix of the model -> the matmuls over all tokens that use it, in order."""
    found: dict[Matrix, list[Node]] = {}
    for node in recording.graph.nodes:
        weight = recording.weight(node) if node.is_linear else None
        if weight is None or weight.value.dim() < 2:
            continue
        live = node.factors[0] if node.factors[0].live else node.factors[1]
        contracted = live.value.shape[-1] if live is node.factors[0] else live.value.shape[-2]
        if live.value.numel() // contracted in recording.token_rows:
            key = (weight.storage, int(weight.value.storage_offset()), tuple(weight.value.stride()[-2:]))
            found.setdefault(key, []).append(node)
    return found


def depth(nodes: list[Node]) -> int:
    """The length of the longest chain of matmuls in which each depends on the one before."""
    best = [1] * len(nodes)
    for j in range(1, len(nodes)):
        before = ancestors(nodes[j])
        best[j] = 1 + max((best[i] for i in range(j) if nodes[i].index in before), default=0)
    return max(best)


def weights_of_its_own(subject: Subject, recording: Recording) -> Finding:
    """No matrix of a layer is used at two depths."""
    used = uses(recording)
    depths = {matrix: depth(nodes) for matrix, nodes in used.items()}
    reused = [Reuse(recording.names[m[0]], m, d, _sliced(recording, used[m][0])) for m, d in depths.items() if d > 1]
    if not used:
        return Finding.skip(ID, "no matmul with a parameter over all tokens was seen")
    if not reused:
        return Finding(ID, Verdict.PASS, 0.0, 0.0, f"none of {len(used)} matrices is used at two depths")
    kept = {n: v for n, v in vars(subject.module).items() if isinstance(v, int | str)} if subject.module else {}
    declared = declared_sharing({**kept, **subject.facts.raw})
    if declared is not None:
        return _design(reused, f"the config declares it ({declared})")
    layers = subject.facts.whole("n_layers")
    if subject.interface.library:
        return _design(reused, "the class is a library's")
    for one in reused:
        found = _shared(one, reused) or _called_again(one, depths, recording, layers)
        if found is not None:
            return found
    return _design(reused, "it is a loop over a layer that is in no list, or one up to the declared depth")


def _sliced(recording: Recording, node: Node) -> bool:
    weight = recording.weight(node)
    assert weight is not None
    return weight.value.numel() * weight.value.element_size() < weight.storage_bytes


def _design(reused: list[Reuse], reason: str) -> Finding:
    why = f"{reused[0].names[0]} and {len(reused) - 1} more run at several depths; not judged, because {reason}"
    return Finding(ID, Verdict.SKIP, float(len(reused)), 0.0, why, "", {"explained": True})


def _template(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _numbers(name: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", name)]


def _shared(one: Reuse, reused: list[Reuse]) -> Finding | None:
    """One parameter under the names of two layers."""
    alike = [n for n in one.names if _template(n) == _template(one.names[0])]
    if len(alike) < 2:
        return None
    first, second = alike[:2]
    number = next((b for a, b in zip(_numbers(first), _numbers(second), strict=True) if a != b), None)
    more = f" (and {len(reused) - 1} more)" if len(reused) > 1 else ""
    return Finding(
        ID,
        Verdict.FAIL,
        float(len(reused)),
        0.0,
        f"{first} and {second} are one tensor{more}: layers share their weights, and nothing declares it",
        "Build every layer by itself: nn.ModuleList(Block() for _ in range(n)), not [Block()] * n.",
        {"layer": number, "parameters": alike[:20]},
    )


def _called_again(one: Reuse, depths: dict[Matrix, int], recording: Recording, layers: int | None) -> Finding | None:
    """One layer of a list, or of stacked weights, that runs again while others run once or not at all.

    Where no number of layers is declared, all of them may run again.
    """
    name = one.names[0]
    if one.sliced:
        runs = [d for m, d in depths.items() if m[0] == one.matrix[0]]
        size = layers or len(runs)
    else:
        group = [s for s, names in recording.names.items() if _template(names[0]) == _template(name)]
        runs, size = [max((d for m, d in depths.items() if m[0] == s), default=0) for s in group], len(group)
    if size < 2 or (len(runs) == size and min(runs) == max(runs) and layers in (None, sum(runs))):
        return None
    numbers = _numbers(name)
    at = (one.matrix[1] and f" (at offset {one.matrix[1]})") or ""
    return Finding(
        "layer_reuse/calls",
        Verdict.FAIL,
        float(one.depth),
        1.0,
        f"{name}{at} is used {one.depth} times, one after the other: a layer runs again, and nothing declares it",
        "Call every layer once, in order: for layer in self.layers: x = layer(x).",
        {"layer": numbers[0] if numbers and not one.sliced else None, "parameters": one.names[:20]},
    )
