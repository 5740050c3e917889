"""Compute-optimal training: the number of parameters N and of tokens D for a budget of C = 6·N·D FLOPs.

Two methods are compared. The rule of thumb D = 20·N does not minimise a loss. The fitted loss
L(N, D) = E + A/N^alpha + B/D^beta (Hoffmann et al. 2022, section 3.3) has, for given C, the minimum

    N = G·(C/6)^(beta/(alpha+beta)),  D = (C/6)^(alpha/(alpha+beta))/G,  G = (alpha·A/(beta·B))^(1/(alpha+beta))

It depends strongly on the constants. At C = 1.2e24 the published constants give about 99 tokens per parameter; the
refit of the same data by Besiroglu et al. 2024 gives about 18.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from glassformer.sizing.layout import columns, wrap


@dataclass(frozen=True)
class LossFit:
    """Constants of L(N, D) = E + A/N^alpha + B/D^beta, in nats per token."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("A", "B", "alpha", "beta"):
            if not getattr(self, name) > 0:
                raise ValueError(f"LossFit.{name}={getattr(self, name)} must be positive, or the loss has no minimum.")

    def loss(self, parameters: float, tokens: float) -> float:
        """Return L(N, D) in nats per token."""
        return self.E + self.A / parameters**self.alpha + self.B / tokens**self.beta

    @property
    def G(self) -> float:
        return float((self.alpha * self.A / (self.beta * self.B)) ** (1 / (self.alpha + self.beta)))

    def optimum(self, flops: float) -> "Allocation":
        """Return the (N, D) with the lowest loss subject to 6·N·D = flops, by the closed form above."""
        total = self.alpha + self.beta
        N = self.G * (flops / 6) ** (self.beta / total)
        return Allocation(self.source, N, flops / 6 / N, flops, self.loss(N, flops / 6 / N))

    def budget_for_parameters(self, parameters: float) -> float:
        """Return the budget C for which N is optimal: 6·(N/G)^((alpha+beta)/beta)."""
        return float(6 * (parameters / self.G) ** ((self.alpha + self.beta) / self.beta))

    def budget_for_tokens(self, tokens: float) -> float:
        """Return the budget C for which D is optimal: 6·(D·G)^((alpha+beta)/alpha)."""
        return float(6 * (tokens * self.G) ** ((self.alpha + self.beta) / self.alpha))


PUBLISHED = LossFit(1.69, 406.4, 410.7, 0.34, 0.28, "Hoffmann et al. 2022")
CORRECTED = LossFit(1.8172, 482.01, 2085.43, 0.3478, 0.3658, "Besiroglu et al. 2024")


@dataclass(frozen=True)
class Allocation:
    """One way to spend `flops`: a model of N parameters trained on D tokens."""

    method: str
    parameters: float
    tokens: float
    flops: float
    loss: float
    """Predicted loss in nats per token. The rule of thumb has no fit of its own, so CORRECTED is used for it."""

    @property
    def ratio(self) -> float:
        """Tokens per parameter, D/N."""
        return self.tokens / self.parameters


@dataclass(frozen=True)
class Chinchilla:
    """Allocations by the rule of thumb and by each fit, for one given quantity (flops, params or tokens)."""

    given: str
    value: float
    allocations: tuple[Allocation, ...]

    def to_dict(self) -> dict[str, Any]:
        rows = [{**asdict(a), "tokens_per_parameter": a.ratio} for a in self.allocations]
        return {"given": self.given, "value": self.value, "allocations": rows}

    def text(self, width: int | None = None) -> str:
        """Return the table as text. Columns that do not fit into `width` go on the next line."""
        rows = [("", "N parameters", "D tokens", "D/N", "C FLOPs", "loss")]
        for a in self.allocations:
            numbers = f"{a.parameters:.4g}", f"{a.tokens:.4g}", f"{a.ratio:.1f}", f"{a.flops:.4g}", f"{a.loss:.4f}"
            rows.append((a.method, *numbers))
        meaning = (
            "  The rule of thumb does not minimise a loss. The other two minimise a fitted loss, with the published\n"
            "  and with refitted constants. Losses are in nats per token of the data of the fits; for the rule of\n"
            "  thumb it is the loss of the refit."
        )
        title = f"Compute-optimal training for {self.given} = {self.value:.4g}    C = 6·N·D"
        return "\n".join([wrap(title, width), "", *columns(rows, width), "", wrap(meaning, width, "  ")])


def chinchilla(
    *,
    flops: float | None = None,
    params: float | None = None,
    tokens: float | None = None,
    ratio: float = 20.0,
    fits: tuple[LossFit, ...] = (PUBLISHED, CORRECTED),
) -> Chinchilla:
    """Return the compute-optimal N and D for exactly one given quantity: C, N (`params`) or D (`tokens`).

    The rule of thumb combines C = 6·N·D and D = ratio·N to N = sqrt(C/(6·ratio)); C = 1.2e24 gives N = 1e11, D = 2e12.
    The fits use the closed form of the module docstring, solved for the quantities that are not given.
    """
    given = {k: v for k, v in (("flops", flops), ("params", params), ("tokens", tokens)) if v is not None}
    if len(given) != 1:
        raise ValueError(f"chinchilla got {', '.join(given) or 'nothing'}: give exactly one of flops, params, tokens.")
    [(name, value)] = given.items()
    for label, number in ((name, value), ("ratio", ratio)):
        if not (number > 0 and math.isfinite(number)):
            raise ValueError(f"{label}={number} must be a positive finite number.")
    match name:
        case "flops":
            N = math.sqrt(value / (6 * ratio))
            budgets = [float(value)] * len(fits)
        case "params":
            N = float(value)
            budgets = [fit.budget_for_parameters(value) for fit in fits]
        case _:
            N = value / ratio
            budgets = [fit.budget_for_tokens(value) for fit in fits]
    rule = Allocation(f"rule D = {ratio:g}·N", N, ratio * N, 6 * ratio * N * N, CORRECTED.loss(N, ratio * N))
    return Chinchilla(name, float(value), (rule, *(fit.optimum(C) for fit, C in zip(fits, budgets, strict=True))))
