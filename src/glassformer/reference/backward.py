"""A whole Transformer, backward: the loss of a language model and its gradient, by hand, with no autograd.

Every function here undoes one function of forward.py: it is given the gradient of the loss with respect to that
function's output and what that function saved, and returns the gradient with respect to its input and parameters. The
residual stream carries the gradient down: x + f(x) passes d straight on and adds what comes back through f.

Works for a decoder (targets are the next tokens), for an encoder (targets are the hidden tokens, the rest ignored) and
for an encoder-decoder.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from glassformer.config import Learned, ModelConfig, NoFeedForward, QueryKeyPosition, Seq2SeqConfig, T5Bias
from glassformer.reference.arrays import Array, Params, Saved, Tokens, over, under
from glassformer.reference.attention import Waves
from glassformer.reference.backward_attention import attention_backward, t5_bias_backward
from glassformer.reference.backward_feedforward import feedforward_backward
from glassformer.reference.backward_ops import (
    IGNORE,
    activation_slope,
    cross_entropy,
    cross_entropy_backward,
    linear_backward,
    lookup_backward,
    normalize_backward,
)
from glassformer.reference.forward import as_tokens, attention_waves, forward, head, run_seq2seq, run_stack
from glassformer.reference.masks import as_mask, default_positions
from glassformer.reference.params import as_params, stack_name
from glassformer.reference.positions import t5_buckets


def loss(
    config: ModelConfig,
    params: Mapping[str, Any],
    tokens: npt.ArrayLike,
    targets: npt.ArrayLike,
    mask: npt.ArrayLike | None = None,
) -> float:
    """Mean over the counted targets of -log p(target), with targets (B,T) beside tokens (B,T).

    targets[b,t] is what the logits at place t should predict, so for a decoder the token at t + 1: nothing is shifted
    here. A target of -100 is not counted.
    """
    return cross_entropy(forward(config, params, tokens, mask=mask), as_targets(config, targets))


def loss_and_gradients(
    config: ModelConfig,
    params: Mapping[str, Any],
    tokens: npt.ArrayLike,
    targets: npt.ArrayLike,
    mask: npt.ArrayLike | None = None,
) -> tuple[float, Params]:
    """The loss and its gradient with respect to every parameter, under the parameters' own names."""
    weights, wanted = as_params(config, params), as_targets(config, targets)
    stack = stack_name(config)
    hidden, saved = run_stack(config, weights, stack, tokens, mask)
    logits, saved_head = head(config, weights, hidden)
    gradients = {name: np.zeros_like(value) for name, value in weights.items()}
    d_hidden, head_gradients = head_backward(config, weights, saved_head, cross_entropy_backward(logits, wanted))
    _, stack_gradients = stack_backward(config, weights, stack, saved, d_hidden, tokens, mask)
    _add(gradients, head_gradients)
    _add(gradients, stack_gradients)
    return cross_entropy(logits, wanted), gradients


def loss_and_gradients_seq2seq(
    config: Seq2SeqConfig,
    params: Mapping[str, Any],
    source: npt.ArrayLike,
    target: npt.ArrayLike,
    wanted: npt.ArrayLike,
    source_mask: npt.ArrayLike | None = None,
    mask: npt.ArrayLike | None = None,
) -> tuple[float, Params]:
    """The same for an encoder-decoder that reads source (B,S), is given target (B,T) and should predict wanted (B,T).

    The decoder's cross-attentions all read one memory, so the encoder starts from the sum of their gradients.
    """
    weights, labels = as_params(config, params), as_targets(config, wanted)
    logits, saved = run_seq2seq(config, weights, source, target, source_mask, mask)
    gradients = {name: np.zeros_like(value) for name, value in weights.items()}
    d_hidden, found = head_backward(config, weights, under(saved, "head"), cross_entropy_backward(logits, labels))
    _add(gradients, found)
    d_memory, found = stack_backward(config, weights, "decoder", under(saved, "decoder"), d_hidden, target, mask)
    _add(gradients, found)
    assert d_memory is not None
    _, found = stack_backward(config, weights, "encoder", under(saved, "encoder"), d_memory, source, source_mask)
    _add(gradients, found)
    return cross_entropy(logits, labels), gradients


def head_backward(config: ModelConfig, weights: Params, saved: Saved, d_logits: Array) -> tuple[Array, Params]:
    """logits_v = scale h . W_v + b_v: d_h = scale sum_v d_logits_v W_v, d_W_v = scale d_logits_v h, d_b = d_logits.

    A tied W is the token table, which gets this gradient on top of the embedding's.
    """
    assert config.head is not None
    table = "embed.tokens.weight" if config.head.tied else "head.weight"
    rows, h = d_logits.reshape(-1, config.vocab_size), saved["hidden"].reshape(-1, config.d_model)
    gradients: Params = {table: config.head.scale * rows.T @ h}
    if config.head.bias:
        gradients["head.bias"] = rows.sum(axis=0)
    d_h = config.head.scale * d_logits @ weights[table]
    if config.head.transform is not None:
        d_h, found = normalize_backward(config.norm, weights, "head.norm", saved["norm.input"], d_h)
        gradients |= found
        d_h = d_h * activation_slope(config.head.transform, saved["transform"])
        d_h, found = linear_backward(weights, "head.transform", saved["input"], d_h)
        gradients |= found
    return d_h, gradients


def stack_backward(
    config: ModelConfig,
    weights: Params,
    stack: str,
    saved: Saved,
    d_x: Array,
    tokens: npt.ArrayLike,
    mask: npt.ArrayLike | None,
) -> tuple[Array | None, Params]:
    """Final norm, blocks from last to first, embedding. Returns the gradient of the memory, if one was read.

    The T5 table is read by every block, so its gradient is taken from the sum of the blocks' d_scores; a trained table
    of infused positions likewise, from the sum of their d_infused.
    """
    ids = as_tokens(config, tokens)
    B, T = ids.shape
    places = default_positions(B, T, as_mask(mask, B, T))
    waves = attention_waves(config, places)
    gradients: Params = {}
    if config.placement != "post":
        d_x, gradients = normalize_backward(config.norm, weights, f"{stack}.norm", saved["norm.input"], d_x)
    d_memory: Array | None = None
    d_scores, d_infused = np.zeros(1), np.zeros(1)
    n_layers = config.n_encoder_layers if isinstance(config, Seq2SeqConfig) and stack == "encoder" else config.n_layers
    for layer in reversed(range(n_layers)):
        name = f"{stack}.blocks.{layer}"
        pass_back = BlockBackward(config, under(weights, name), under(saved, f"block.{layer}"), waves)
        d_x = pass_back(d_x)
        gradients |= over(pass_back.gradients, name)
        d_scores, d_infused = d_scores + pass_back.d_scores, d_infused + pass_back.d_infused
        if pass_back.d_memory is not None:
            d_memory = pass_back.d_memory if d_memory is None else d_memory + pass_back.d_memory
    if isinstance(config.position, T5Bias):
        table = f"{stack}.position.weight"
        buckets = t5_buckets(config.position, places, bidirectional=stack == "encoder")
        gradients[table] = t5_bias_backward(weights[table].shape, buckets, d_scores)
    if isinstance(config.position, QueryKeyPosition) and isinstance(config.position.vectors, Learned):
        table, rows = f"{stack}.position.weight", places + config.position.vectors.offset
        gradients[table] = lookup_backward(weights[table].shape, rows, d_infused)
    return d_memory, gradients | embed_backward(config, weights, stack, saved, d_x, ids, places)


class BlockBackward:
    """Backward of one block. Call it with d_y; it returns d_x and keeps the other gradients it met."""

    def __init__(self, config: ModelConfig, weights: Params, saved: Saved, waves: Waves | None) -> None:
        self.config, self.weights, self.saved, self.waves = config, weights, saved, waves
        self.gradients: Params = {}
        self.d_scores: Array = np.zeros(1)
        """(B,H,T,T): of the self-attention's scores, for the T5 table."""
        self.d_infused: Array = np.zeros(1)
        """(B,T,D): of what was added to the input of queries and keys, for a table of infused positions."""
        self.d_memory: Array | None = None
        """(B,S,D): of the encoder's output, when there is cross-attention."""

    def __call__(self, d_y: Array) -> Array:
        """The branches in reverse. Parallel: y = x + a(n) + f(n), n = norm(x), so d_n is the sum from both."""
        if self.config.placement == "parallel":
            return d_y + self._norm("norm", self._attention(d_y) + self._feedforward(d_y))
        if not isinstance(self.config.feedforward, NoFeedForward):
            d_y = self._residual("feedforward", self._feedforward, d_y)
        if "cross.pattern" in self.saved:
            d_y = self._residual("cross", self._cross, d_y)
        return self._residual("attention", self._attention, d_y)

    def _residual(self, name: str, branch: Callable[[Array], Array], d_y: Array) -> Array:
        """pre: y = x + f(norm(x)), so d_x = d_y + norm'(f'(d_y)). post: y = norm(s), s = x + f(x), so d_s = norm'(d_y)
        and d_x = d_s + f'(d_s). Before, d_y reaches x untouched; after, it never does: Xiong et al. 2020."""
        if self.config.placement == "pre":
            return d_y + self._norm(f"norm_{name}", branch(d_y))
        d_sum = self._norm(f"norm_{name}", d_y)
        return d_sum + branch(d_sum)

    def _norm(self, name: str, d_y: Array) -> Array:
        d_x, found = normalize_backward(self.config.norm, self.weights, name, self.saved[f"{name}.input"], d_y)
        self.gradients |= found
        return d_x

    def _attention(self, d_y: Array) -> Array:
        weights, saved = under(self.weights, "attention"), under(self.saved, "attention")
        found = attention_backward(self.config, weights, saved, d_y, self.waves)
        self.gradients |= over(found.params, "attention")
        self.d_scores, self.d_infused = found.scores, found.x + found.keys
        return found.x + found.memory  # x asked and answered

    def _cross(self, d_y: Array) -> Array:
        found = attention_backward(self.config, under(self.weights, "cross"), under(self.saved, "cross"), d_y)
        self.gradients |= over(found.params, "cross")
        self.d_memory = found.memory
        return found.x

    def _feedforward(self, d_y: Array) -> Array:
        assert not isinstance(self.config.feedforward, NoFeedForward)
        weights, saved = under(self.weights, "feedforward"), under(self.saved, "feedforward")
        d_x, found = feedforward_backward(self.config.feedforward, weights, saved, d_y)
        self.gradients |= over(found, "feedforward")
        return d_x


def embed_backward(
    config: ModelConfig, weights: Params, stack: str, saved: Saved, d_x: Array, ids: Tokens, places: Tokens
) -> Params:
    """x = scale tokens[id] + segments[0] + position: each row gets the sum of d_x over the places that read it.

    Fixed waves have nothing to learn. Segments are all 0, for the loss takes none.
    """
    gradients: Params = {}
    if config.embedding.norm:
        d_x, gradients = normalize_backward(config.norm, weights, f"{stack}.embed_norm", saved["embed.sum"], d_x)
    tables = {"embed.tokens.weight": (ids, config.embedding.scale * d_x)}
    if config.embedding.n_segments:
        tables["embed.segments.weight"] = (np.zeros_like(ids), d_x)
    if isinstance(config.position, Learned):
        tables[f"{stack}.position.weight"] = (places + config.position.offset, d_x)
    for name, (rows, d_rows) in tables.items():
        gradients[name] = lookup_backward(weights[name].shape, rows, d_rows)
    return gradients


def sgd(
    config: ModelConfig,
    params: Mapping[str, Any],
    tokens: npt.ArrayLike,
    targets: npt.ArrayLike,
    steps: int,
    lr: float,
) -> list[float]:
    """Plain gradient descent on one batch, w <- w - lr dL/dw; returns the loss before each step and after the last.

    A whole Transformer trains in these few lines, without autograd. The given params are not changed.
    """
    weights = as_params(config, params)
    losses = []
    for _ in range(steps):
        value, gradients = loss_and_gradients(config, weights, tokens, targets)
        losses.append(value)
        weights = {name: weights[name] - lr * gradients[name] for name in weights}
    return [*losses, loss(config, weights, tokens, targets)]


def as_targets(config: ModelConfig, targets: npt.ArrayLike) -> Tokens:
    """Ids (B,T) as int64. Raises ValueError on an id that is neither in the vocabulary nor -100."""
    ids = np.asarray(targets)
    if not np.issubdtype(ids.dtype, np.integer) or not np.all(
        (ids == IGNORE) | ((ids >= 0) & (ids < config.vocab_size))
    ):
        raise ValueError(f"targets are ids below {config.vocab_size}, or {IGNORE} for a place that is not counted.")
    return ids.astype(np.int64)


def _add(gradients: Params, found: Params) -> None:
    """Add, do not replace: the token table is read by the embedding and by a tied head, and by both stacks."""
    for name, value in found.items():
        gradients[name] = gradients[name] + value
