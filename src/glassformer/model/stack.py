"""A stack of blocks: what an encoder and a decoder have in common. They differ only in `causal` and `cross`."""

from torch import Tensor, nn

from glassformer import config as c
from glassformer.model.block import build_block
from glassformer.model.cache import Cache
from glassformer.model.context import LayerPositions, forward_context
from glassformer.model.norm import build_norm
from glassformer.model.positions import NoPosition, T5Bias, build_position
from glassformer.model.tap import NO_TAP, Tap, scoped
from glassformer.shapes import Bool, Float, Int


class Stack(nn.Module):
    """Positions, embedding norm, projection to D, blocks, final norm."""

    def __init__(self, cfg: c.ModelConfig, n_layers: int, causal: bool, cross: bool = False):
        super().__init__()
        self.causal = causal
        self.max_position = cfg.max_len if cfg.learned_positions is not None else None
        self.windows = [cfg.window(layer) for layer in range(n_layers)]
        self.position = build_position(cfg.position, cfg, causal)
        self.kinds = layer_positions(cfg, n_layers, causal)
        self.score_bias = T5Bias(cfg.score_bias, cfg.n_heads, causal) if cfg.score_bias else None
        self.embed_norm = build_norm(cfg.position_width, cfg.norm) if cfg.embedding.norm else None
        self.projects_first = cfg.embedding.project == "before_positions"
        self.project = (
            nn.Linear(cfg.embedding_width, cfg.d_model, bias=cfg.embedding.project_bias)
            if cfg.embedding.width
            else None
        )
        self.dropout = nn.Dropout(cfg.dropout)
        self.block_of_layer = [cfg.block_of_layer(layer) for layer in range(n_layers)]
        first_layers = [self.block_of_layer.index(block) for block in range(max(self.block_of_layer) + 1)]
        self.blocks = nn.ModuleList(build_block(cfg, layer, cross) for layer in first_layers)
        self.norm = build_norm(cfg.d_model, cfg.norm) if cfg.placement != "post" else None

    def forward(
        self,
        x: Float[Tensor, "B T W"],
        mask: Bool[Tensor, "B T"] | Bool[Tensor, "B T S"] | None = None,
        positions: Int[Tensor, "#B T"] | None = None,
        cache: Cache | None = None,
        tap: Tap = NO_TAP,
        memory: Float[Tensor, "B N D"] | None = None,
        memory_mask: Bool[Tensor, "B N"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        context = forward_context(
            *(x, self.position, self.windows, self.causal, mask, positions, cache, memory, memory_mask),
            self.kinds,
            self.score_bias,
        )
        x = tap("embed", self.dropout(self.add_positions(x, context.positions)))
        for layer, block in enumerate(self.layers):
            x = block(x, context, layer, scoped(tap, f"blocks.{layer}."))
        return tap("final", x if self.norm is None else self.norm(x))

    @property
    def layers(self) -> nn.ModuleList:
        """The block of each layer. A block that several layers share is in the list several times."""
        if len(self.blocks) == len(self.block_of_layer):
            return self.blocks
        return nn.ModuleList(self.blocks[block] for block in self.block_of_layer)

    def add_positions(self, x: Float[Tensor, "B T W"], positions: Int[Tensor, "#B T"]) -> Float[Tensor, "B T D"]:
        """Add positions to the token embedding, apply its norm, and project it to D if it has another width."""
        if self.project is not None and self.projects_first:
            x = self.project(x)
        x = self.position.add(x, positions)
        x = x if self.embed_norm is None else self.embed_norm(x)
        return x if self.project is None or self.projects_first else self.project(x)

    def scheme(self, layer: int) -> NoPosition:
        """Return the position scheme of one layer."""
        which = 0 if self.kinds is None else self.kinds.index[layer]
        return self.position if not which or self.kinds is None else self.kinds.others[which - 1]


def layer_positions(cfg: c.ModelConfig, n_layers: int, causal: bool) -> LayerPositions | None:
    """Build the position schemes of layers that differ from the model's; None if all layers are alike."""
    specs = list(dict.fromkeys([cfg.position, *(cfg.layer_position(layer) for layer in range(n_layers))]))
    if len(specs) == 1:
        return None
    index = [specs.index(cfg.layer_position(layer)) for layer in range(n_layers)]
    return LayerPositions([build_position(spec, cfg, causal) for spec in specs[1:]], index)
