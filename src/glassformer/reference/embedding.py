"""The embedding: token, segment and position vectors, its norm, and the projection of a factorized one.

The forward pass is `embed`, its gradient `embed_backward`.
"""

import numpy as np
import numpy.typing as npt

from glassformer.config import Learned, ModelConfig, Sinusoidal
from glassformer.reference.arrays import Array, Params, Saved, Tokens
from glassformer.reference.backward_ops import linear_backward, lookup_backward, normalize_backward
from glassformer.reference.ops import linear, normalize
from glassformer.reference.params import position_width
from glassformer.reference.positions import sinusoidal


def embed(
    config: ModelConfig,
    weights: Params,
    stack: str,
    ids: Tokens,
    position_ids: Tokens,
    segments: npt.ArrayLike | None,
) -> tuple[Array, Saved]:
    """Embed the tokens: (B,T) -> (B,T,D).

        x = scale * tokens[id] + segments[segment] + position,   then the embedding norm, if the config has one

    Terms that the config does not have are left out. Segment ids default to 0, as in BERT. A factorized embedding
    (`embedding.width`) is projected to D by a linear layer, after the norm or before the positions are added. Lan et
    al. 2020, section 3.1.
    """
    x = config.embedding.scale * weights["embed.tokens.weight"][ids]
    if config.embedding.n_segments:
        segment_ids = np.zeros_like(ids) if segments is None else np.asarray(segments, dtype=np.int64)
        x = x + weights["embed.segments.weight"][segment_ids]
    elif segments is not None:
        raise ValueError(
            "segments were given, but embedding.n_segments is 0, so this model has no segment table: leave them out."
        )
    saved: Saved = {}
    if config.embedding.width is not None and config.embedding.project == "before_positions":
        saved["project.input"] = x
        x = linear(weights, f"{stack}.project", x)
    if isinstance(config.position, Learned | Sinusoidal):
        x = x + position_vectors(config, config.position, weights, stack, position_ids)
    saved["embed.sum"] = x
    if config.embedding.norm:
        x = normalize(config.norm, weights, f"{stack}.embed_norm", x)
    if config.embedding.width is not None and config.embedding.project == "after_norm":
        saved["project.input"] = x
        x = linear(weights, f"{stack}.project", x)
    return x, saved | {"embed": x}


def position_vectors(
    config: ModelConfig, kind: Learned | Sinusoidal, weights: Params, stack: str, position_ids: Tokens
) -> Array:
    """Return the position embedding, (B,T) -> (B,T,D): rows of the learned table, or fixed sinusoids.

    A learned table is read at row position + offset (RoBERTa has an offset of 2).
    """
    if isinstance(kind, Sinusoidal):
        return sinusoidal(kind, position_ids, position_width(config))
    table = weights[f"{stack}.position.weight"]
    rows = position_ids + kind.offset
    if rows.max(initial=0) >= len(table):
        raise ValueError(
            f"position {position_ids.max()} is outside the learned position table of max_len={config.max_len}: use "
            "shorter sequences or a larger max_len."
        )
    return table[rows]


def embed_backward(
    config: ModelConfig, weights: Params, stack: str, saved: Saved, d_x: Array, ids: Tokens, position_ids: Tokens
) -> Params:
    """Backward pass of `embed`: x = scale * tokens[id] + segments[0] + position, with norm and projection.

    The gradient of a table row is the sum of d_x over all positions that read the row. Sinusoids have no parameters.
    The segment ids are all 0, because the loss functions do not accept any.
    """
    gradients: Params = {}
    tables: dict[str, tuple[Tokens, Array]] = {}
    projected = config.embedding.project if config.embedding.width is not None else None
    if projected == "after_norm":
        d_x, gradients = linear_backward(weights, f"{stack}.project", saved["project.input"], d_x)
    if config.embedding.norm:
        d_x, norm_gradients = normalize_backward(config.norm, weights, f"{stack}.embed_norm", saved["embed.sum"], d_x)
        gradients |= norm_gradients
    if isinstance(config.position, Learned):
        tables[f"{stack}.position.weight"] = (position_ids + config.position.offset, d_x)
    if projected == "before_positions":
        d_x, gradients_of_projection = linear_backward(weights, f"{stack}.project", saved["project.input"], d_x)
        gradients |= gradients_of_projection
    tables["embed.tokens.weight"] = (ids, config.embedding.scale * d_x)
    if config.embedding.n_segments:
        tables["embed.segments.weight"] = (np.zeros_like(ids), d_x)
    for name, (rows, d_rows) in tables.items():
        gradients[name] = lookup_backward(weights[name].shape, rows, d_rows)
    return gradients
