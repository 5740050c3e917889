"""Mixtures of experts, and the type of every feed-forward."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from glassformer.config.parts import Dense, Gated, NoFeedForward
from glassformer.errors import require, require_choice, require_positive

RouterScore = Literal["softmax", "sigmoid"]
"""How the logits of a router become scores; see Router.score."""
GroupScore = Literal["sum_of_two", "max"]
"""The score of a group of experts; see Router.group_score."""


@dataclass(frozen=True)
class Router:
    """How a mixture of experts scores and chooses its experts."""

    score: RouterScore = "softmax"
    """softmax over all experts, or the sigmoid of each logit."""
    bias: bool = False
    """Train a bias of the logits."""
    scale: float = 1.0
    """Factor on the weights of the chosen experts."""
    correction: bool = False
    """Add a stored vector, which is not trained by gradients, to the scores when experts are chosen. Their weights are
    the scores without it."""
    groups: int = 1
    """Number of groups of neighbouring experts. Experts are chosen from the best `top_groups` groups only."""
    top_groups: int = 1
    """Number of groups from which experts are chosen."""
    group_score: GroupScore = "sum_of_two"
    """The score of a group: the sum of its two largest scores, or the largest."""

    def __post_init__(self) -> None:
        require_choice(self, "score", RouterScore)
        require_choice(self, "group_score", GroupScore)
        require_positive(self, "groups", "top_groups")
        require(self.scale > 0, f"Router.scale={self.scale} must be positive.")
        require(
            self.top_groups <= self.groups,
            f"Router.top_groups={self.top_groups} exceeds groups={self.groups}: choose from at most all groups.",
        )


@dataclass(frozen=True)
class MoE:
    """A mixture of experts: the sum of p_e * expert_e(x) over the A experts with the largest p_e.

    p = softmax(router(x)) over all E experts, then the A largest (ties: lowest index), divided by their sum if
    `normalize`. `router` describes other scores. A `shared` expert computes every token in addition. No token is
    dropped. Fedus et al. 2021; Jiang et al. 2024 for the normalised form.
    """

    kind: ClassVar[str] = "moe"
    n_experts: int
    """E, the number of experts."""
    n_active: int
    """A, the number of experts that compute each token."""
    expert: Dense | Gated
    """The feed-forward of one expert."""
    normalize: bool = True
    """Divide the A largest probabilities by their sum."""
    router: Router = Router()
    """How experts are scored and chosen."""
    shared: Dense | Gated | None = None
    """A feed-forward that computes every token, added to the sum. Default: none."""
    shared_gate: bool = False
    """Multiply the output of the shared feed-forward by sigmoid(w.x), with a trained vector w."""

    def __post_init__(self) -> None:
        require_positive(self, "n_experts", "n_active")
        require(
            self.shared is not None or not self.shared_gate,
            "MoE.shared_gate multiplies the shared feed-forward, and there is none: give shared.",
        )
        self._check_groups()
        require(
            self.n_active <= self.n_experts,
            f"n_active={self.n_active} exceeds n_experts={self.n_experts}: a token cannot visit more experts "
            "than exist.",
        )

    def _check_groups(self) -> None:
        groups, least = self.router.groups, 2 if self.router.group_score == "sum_of_two" else 1
        require(
            self.n_experts % groups == 0,
            f"n_experts={self.n_experts} is not a multiple of router.groups={groups}: groups must be equally large.",
        )
        size = self.n_experts // groups
        require(groups == 1 or size >= least, f"groups of {size} experts cannot be scored by their {least} best ones.")
        require(
            groups == 1 or self.n_active <= self.router.top_groups * size,
            f"n_active={self.n_active} exceeds the {self.router.top_groups * size} experts of the best "
            f"{self.router.top_groups} groups: raise router.top_groups.",
        )


FeedForward = Dense | Gated | MoE | NoFeedForward
"""Every feed-forward."""
