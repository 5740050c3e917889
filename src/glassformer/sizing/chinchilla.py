"""How to spend a training budget: parameters N against tokens D at C = 6·N·D operations.

Two answers stand side by side. The rule of thumb D = 20·N solves two equations and optimises nothing. The fitted loss
L(N, D) = E + A/N^alpha + B/D^beta (Hoffmann et al. 2022, section 3.3) has, at given C, the minimum

    N = G·(C/6)^(beta/(alpha+beta)),  D = (C/6)^(alpha/(alpha+beta))/G,  G = (alpha·A/(beta·B))^(1/(alpha+beta)),

which depends strongly on the constants: those first published give about 99 tokens per parameter at C = 1.2e24, the
refit of the same data by Besiroglu et al. 2024 about 18.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from glassformer.sizing.layout import columns, fit


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
        """L(N, D)."""
        return self.E + self.A / parameters**self.alpha + self.B / tokens**self.beta

    @property
    def G(self) -> float:
        return float((self.alpha * self.A / (self.beta * self.B)) ** (1 / (self.alpha + self.beta)))

    def optimum(self, flops: float) -> "Allocation":
        """The (N, D) of least loss with 6·N·D = flops; see the module for the closed form."""
        total = self.alpha + self.beta
        N = self.G * (flops / 6) ** (self.beta / total)
        return Allocation(self.source, N, flops / 6 / N, flops, self.loss(N, flops / 6 / N))

    def budget_for_parameters(self, parameters: float) -> float:
        """C at which N is the optimum: 6·(N/G)^((alpha+beta)/beta)."""
        return float(6 * (parameters / self.G) ** ((self.alpha + self.beta) / self.beta))

    def budget_for_tokens(self, tokens: float) -> float:
        """C at which D is the optimum: 6·(D·G)^((alpha+beta)/alpha)."""
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
    """Predicted by the method's own fit; by the corrected fit for the rule of thumb, which has none."""

    @property
    def ratio(self) -> float:
        """D/N, tokens per parameter."""
        return self.tokens / self.parameters


@dataclass(frozen=True)
class Chinchilla:
    """The rule's answer and each fit's, for the one quantity given."""

    given: str
    value: float
    allocations: tuple[Allocation, ...]

    def to_dict(self) -> dict[str, Any]:
        rows = [{**asdict(a), "tokens_per_parameter": a.ratio} for a in self.allocations]
        return {"given": self.given, "value": self.value, "allocations": rows}

    def text(self, width: int | None = None) -> str:
        """The table for a person; what would go beyond `width` stands below."""
        rows = [("", "N parameters", "D tokens", "D/N", "C FLOPs", "loss")]
        for a in self.allocations:
            numbers = f"{a.parameters:.4g}", f"{a.tokens:.4g}", f"{a.ratio:.1f}", f"{a.flops:.4g}", f"{a.loss:.4f}"
            rows.append((a.method, *numbers))
        meaning = (
            "  The rule optimises nothing; the others minimise a fitted loss, with the constants as first published\n"
            "  and as refitted. Loss in nats per token of the fits' own data; the rule's is that of the refit."
        )
        title = f"Compute-optimal training for {self.given} = {self.value:.4g}    C = 6·N·D"
        return "\n".join([fit(title, width), "", *columns(rows, width), "", fit(meaning, width, "  ")])


def chinchilla(
    *,
    flops: float | None = None,
    params: float | None = None,
    tokens: float | None = None,
    ratio: float = 20.0,
    fits: tuple[LossFit, ...] = (PUBLISHED, CORRECTED),
) -> Chinchilla:
    """Compute-optimal N and D from exactly one of: a budget C, a model size N, a data size D.

    The rule: C = 6·N·D and D = ratio·N give N = sqrt(C/(6·ratio)); C = 1.2e24 gives N = 1e11, D = 2e12. The fits: the
    closed form of the module, solved for whichever quantity is not given.
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
