"""Why two models first differ at an activation: the convention that turns one into the other.

Each explanation recomputes the operation from the first model's recorded inputs with another convention and reports
what is left of the difference to the second model's output. One that leaves as much as it found is not given.
"""

import math
from collections.abc import Callable

from glassformer.doctor.compare.explain_attention import (
    explain_mask,
    explain_merged,
    explain_pattern,
    explain_projected,
    explain_scores,
    explain_turned,
    explain_values,
    explain_weights,
)
from glassformer.doctor.compare.explain_linear import explain_linear, explain_logits
from glassformer.doctor.compare.explain_stream import (
    explain_activation,
    explain_embed,
    explain_norm,
    explain_sum,
    explain_tokens,
)
from glassformer.doctor.compare.scene import Explanation, Scene

BY_KIND: dict[str, Callable[[Scene], Explanation | None]] = {
    "tokens": explain_tokens,
    "embed": explain_embed,
    "normed": explain_norm,
    "final": explain_norm,
    "projected": explain_projected,
    "q": explain_turned,
    "k": explain_turned,
    "v": explain_values,
    "mask": explain_mask,
    "scores": explain_scores,
    "pattern": explain_pattern,
    "weights": explain_weights,
    "heads": explain_merged,
    "merged": explain_merged,
    "out": explain_linear,
    "pre": explain_linear,
    "post": explain_activation,
    "sum": explain_sum,
    "logits": explain_logits,
}


def explain(scene: Scene) -> Explanation:
    """The most likely convention, or an explanation that says none of the known ones fits."""
    if scene.a.value.shape != scene.b.value.shape:
        shapes = f"{tuple(scene.a.value.shape)} in A and {tuple(scene.b.value.shape)} in B"
        return Explanation("shape", f"the shapes differ: {shapes} (B, then heads or time, then width)", math.inf)
    found = BY_KIND[scene.a.kind](scene)
    if found is not None:
        return found
    return Explanation("unknown", "none of the conventions tried turns one into the other", math.inf)
