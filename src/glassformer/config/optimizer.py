"""Which optimizers a run can choose, and which parameters each of them updates. No torch: sizing reads this too.

Every parameter matches exactly one row of TABLE. The row says whether weight decay applies and whether Muon updates it.
"""

import fnmatch
from dataclasses import dataclass
from typing import Literal

OptimizerKind = Literal["adamw", "muon"]
"""The optimizers of `glass train`: AdamW for everything, or Muon for the matrices of the blocks and AdamW for the rest.
The run file, the command line, the memory estimate and the studio all read this type."""


@dataclass(frozen=True)
class Rule:
    """How the parameters whose names match `pattern` are treated."""

    pattern: str
    decayed: bool
    """True if weight decay applies."""
    matrix: bool = False
    """True for a hidden matrix, which Muon updates with an orthogonalized step."""


TABLE: tuple[Rule, ...] = (
    Rule("*.blocks.*.q.weight", decayed=True, matrix=True),
    Rule("*.blocks.*.k.weight", decayed=True, matrix=True),
    Rule("*.blocks.*.v.weight", decayed=True, matrix=True),
    Rule("*.blocks.*.o.weight", decayed=True, matrix=True),
    Rule("*.blocks.*.up.weight", decayed=True, matrix=True),
    Rule("*.blocks.*.gate.weight", decayed=True, matrix=True),
    Rule("*.blocks.*.down.weight", decayed=True, matrix=True),
    Rule("*.blocks.*.router.weight", decayed=True),
    Rule("embed.*.weight", decayed=True),
    Rule("head.weight", decayed=True),
    Rule("head.transform.weight", decayed=True),
    Rule("pooler.weight", decayed=True),
    Rule("*.position.weight", decayed=False),
    Rule("*norm*.weight", decayed=False),
    Rule("*.bias", decayed=False),
)


def rule_for(name: str) -> Rule:
    """Return the one row of TABLE that matches a parameter."""
    found = [rule for rule in TABLE if fnmatch.fnmatchcase(name, rule.pattern)]
    if len(found) != 1:
        rows = ", ".join(rule.pattern for rule in found) or "no row"
        raise ValueError(f"parameter {name} matches {rows} of the optimizer table: it must match exactly one.")
    return found[0]
