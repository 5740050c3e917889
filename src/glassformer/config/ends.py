"""The two ends of a model, embedding and head, and the token ids with a special meaning."""

from dataclasses import dataclass
from typing import Literal

from glassformer.config.parts import Activation
from glassformer.errors import require, require_choice, require_positive

ProjectionPlace = Literal["after_norm", "before_positions"]
"""Where an embedding of another width than D is projected to D; see Embedding.project."""


@dataclass(frozen=True)
class Embedding:
    """scale * tokens[id] (+ segments[s]) (+ positions), then the norm if `norm`; with `width`, projected to D."""

    scale: float = 1.0
    """Factor on the token embedding."""
    n_segments: int = 0
    """Number of segment ids (BERT's token types); 0: no segment embedding."""
    norm: bool = False
    """Apply the norm of the model to the embedding."""
    width: int | None = None
    """Width of the token and segment tables, followed by a linear layer to D. Default: D, without such a layer."""
    project: ProjectionPlace = "after_norm"
    """Where that linear layer is: after positions and norm, which then have this width too (ALBERT, ELECTRA), or before
    the positions are added (OPT 350M)."""
    project_bias: bool = True
    """Train a bias of that linear layer."""

    def __post_init__(self) -> None:
        require(self.n_segments >= 0, f"Embedding.n_segments={self.n_segments} must be 0 or more.")
        require_choice(self, "project", ProjectionPlace)
        if self.width is not None:
            require_positive(self, "width")
        require(
            self.width is not None or (self.project == "after_norm" and self.project_bias),
            "Embedding.project and project_bias describe the projection of a table of another width: give width too.",
        )


@dataclass(frozen=True)
class Head:
    """logits = (scale * h) W^T + bias, with h = norm(activation(transform(x))) if `transform` names an activation.

    With `width` and no activation, h = transform(x), a linear layer alone (OPT 350M). With `softcap` c the logits z
    become c * tanh(z / c).
    """

    tied: bool = True
    """Use the token embedding as W: one parameter, not two equal ones."""
    bias: bool = False
    """Train a bias of the logits."""
    scale: float = 1.0
    """Factor on the input of the head."""
    transform: Activation | None = None
    """Activation of a linear layer and norm before the head, as in BERT's masked-LM head. Default: no such layer."""
    width: int | None = None
    """Width of h, the output of the linear layer before the head. Default: D; without a transform, no such layer."""
    transform_bias: bool = True
    """Train a bias of that linear layer."""
    softcap: float | None = None
    """Bound c of the logits. Default: none."""

    def __post_init__(self) -> None:
        require(self.softcap is None or self.softcap > 0, f"Head.softcap={self.softcap} must be positive.")
        if self.transform is not None:
            require_choice(self, "transform", Activation)
        if self.width is not None:
            require_positive(self, "width")
        require(
            self.transform_bias or self.has_transform,
            "Head.transform_bias=False describes the linear layer before the head: give transform or width too.",
        )

    @property
    def has_transform(self) -> bool:
        """True if a linear layer precedes the head."""
        return self.transform is not None or self.width is not None


@dataclass(frozen=True)
class Special:
    """Token ids with a special meaning. Generation and the tokenizer use them; the forward pass does not."""

    bos: int | None = None
    """Beginning of a text."""
    eos: tuple[int, ...] = ()
    """Ends of a text: generation stops after one of them."""
    pad: int | None = None
    """Padding."""
    start: int | None = None
    """First decoder token of an encoder-decoder."""
    forced_bos: int | None = None
    """The first token of every generated text, such as the language of a translation. Default: none."""
    forced_eos: int | None = None
    """The last token of a generated text that reaches its maximum length. Default: none."""
    suppressed: tuple[int, ...] = ()
    """Tokens that are never generated."""

    @property
    def limits_generation(self) -> bool:
        """True if any generated token is forced or suppressed."""
        return self.forced_bos is not None or self.forced_eos is not None or bool(self.suppressed)
