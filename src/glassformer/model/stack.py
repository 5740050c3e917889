"""A stack of blocks: what an encoder and a decoder have in common. They differ only in `causal` and `cross`."""

from torch import Tensor, nn

from glassformer import config as c
from glassformer.model.block import build_block
from glassformer.model.cache import Cache
from glassformer.model.context import LayerPositions, forward_context
from glassformer.model.norm import build_norm
from glassformer.model.positions import NoPosition, build_position
from glassformer.model.tap import NO_TAP, Tap, scoped
from glassformer.shapes import Bool, Float, Int


class Stack(nn.Module):
    """Positions, embedding norm, blocks, final norm."""

    def __init__(self, cfg: c.ModelConfig, n_layers: int, causal: bool, cross: bool = False):
        super().__init__()
        self.causal = causal
        self.max_position = cfg.max_len if cfg.learned_positions is not None else None
        self.windows = [cfg.window(layer) for layer in range(n_layers)]
        self.position = build_position(cfg.position, cfg, causal)
        self.kinds = layer_positions(cfg, n_layers, causal)
        self.embed_norm = build_norm(cfg.d_model, cfg.norm) if cfg.embedding.norm else None
        self.dropout = nn.Dropout(cfg.dropout)
        self.blocks = nn.ModuleList(build_block(cfg, layer, cross) for layer in range(n_layers))
        self.norm = build_norm(cfg.d_model, cfg.norm) if cfg.placement != "post" else None

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        mask: Bool[Tensor, "B T"] | Bool[Tensor, "B T S"] | None = None,
        positions: Int[Tensor, "#B T"] | None = None,
        cache: Cache | None = None,
        tap: Tap = NO_TAP,
        memory: Float[Tensor, "B N D"] | None = None,
        memory_mask: Bool[Tensor, "B N"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        context = forward_context(
            x, self.position, self.windows, self.causal, mask, positions, cache, memory, memory_mask, self.kinds
        )
        x = self.position.add(x, context.positions)
        x = x if self.embed_norm is None else self.embed_norm(x)
        x = tap("embed", self.dropout(x))
        for layer, block in enumerate(self.blocks):
            x = block(x, context, scoped(tap, f"blocks.{layer}."))
        return tap("final", x if self.norm is None else self.norm(x))

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
