"""The optimizers of a run, what each keeps in memory, and which parameters each of them updates. No torch.

The run file, the command line, the memory estimate and the studio read OptimizerKind and OPTIMIZERS;
`training.optimizers` builds them. Every parameter matches exactly one row of TABLE, which says whether weight decay
applies and whether the parameter is a hidden matrix.
"""

import fnmatch
from dataclasses import dataclass
from typing import Literal

OptimizerKind = Literal["adamw", "muon"]
"""The optimizers of `glass train`."""
SizedOptimizer = Literal[OptimizerKind, "sgd", "none"]
"""The optimizers of a run file, and two for comparison of memory: plain SGD, and no optimizer step at all."""


@dataclass(frozen=True)
class OptimizerFacts:
    """What run files and memory estimates state about an optimizer."""

    description: str
    """Which parameters it updates, for the documentation of the run file."""
    state: str
    """What it keeps for each parameter, in words."""
    states: int
    """Numbers that it keeps for each number of a parameter."""
    temporaries: int
    """Numbers that an unfused step allocates for each number of the largest parameter. (Muon has its own formula in
    `sizing.step`.)"""


OPTIMIZERS: dict[OptimizerKind, OptimizerFacts] = {
    "adamw": OptimizerFacts("AdamW for all parameters", "two moments", 2, 2),
    "muon": OptimizerFacts(
        "Muon for the matrices of the blocks and AdamW for the other parameters",
        "momentum for the matrices of the blocks, two moments for the rest",
        2,
        0,
    ),
}
"""Every optimizer; a test compares the keys with OptimizerKind."""


@dataclass(frozen=True)
class Rule:
    """How the parameters whose names match `pattern` are treated."""

    pattern: str
    decayed: bool
    """True if weight decay applies."""
    matrix: bool = False
    """True for a hidden matrix of a block, such as those that Muon updates with an orthogonalized step."""


TABLE: tuple[Rule, ...] = (
    Rule("*.lora_A", decayed=True),
    Rule("*.lora_B", decayed=True),
    Rule("*.lora_magnitude", decayed=False),
    Rule("*.blocks.*.q.weight", decayed=True, matrix=True),
    Rule("*.blocks.*.k.weight", decayed=True, matrix=True),
    Rule("*.blocks.*.v.weight", decayed=True, matrix=True),
    Rule("*.blocks.*.o.weight", decayed=True, matrix=True),
    Rule("*.blocks.*.up.weight", decayed=True, matrix=True),
    Rule("*.blocks.*.gate.weight", decayed=True, matrix=True),
    Rule("*.blocks.*.down.weight", decayed=True, matrix=True),
    Rule("*.blocks.*.q_down.weight", decayed=True, matrix=True),
    Rule("*.blocks.*.kv_down.weight", decayed=True, matrix=True),
    Rule("*.blocks.*.k_shared.weight", decayed=True, matrix=True),
    Rule("*.blocks.*.router.weight", decayed=True),
    Rule("*.blocks.*.shared_gate.weight", decayed=True),
    Rule("embed.*.weight", decayed=True),
    Rule("*.project.weight", decayed=True),
    Rule("head.weight", decayed=True),
    Rule("head.transform.weight", decayed=True),
    Rule("pooler.weight", decayed=True),
    Rule("*.position.weight", decayed=False),
    Rule("*.score_bias.weight", decayed=False),
    Rule("*norm*.weight", decayed=False),
    Rule("*.bias", decayed=False),
    Rule("*.sinks", decayed=False),
)


def rule_for(name: str) -> Rule:
    """Return the one row of TABLE that matches a parameter."""
    found = [rule for rule in TABLE if fnmatch.fnmatchcase(name, rule.pattern)]
    if len(found) != 1:
        rows = ", ".join(rule.pattern for rule in found) or "no row"
        raise ValueError(f"parameter {name} matches {rows} of the optimizer table: it must match exactly one.")
    return found[0]
