"""The logit lens: what the model would predict if it stopped at each layer.

The logit lens (nostalgebraist 2020) reads the residual stream x_l after l blocks as `head(norm(x_l))`, with the model's
own final norm and head. Early layers do not use the final layer's basis, so the logit lens is biased there. The tuned
lens (Belrose et al. 2023) inserts an affine map, `head(norm(x_l + A_l x_l + b_l))`, one per layer, trained to minimise
KL(final || lens) with the model frozen. It starts as the logit lens, A_l = 0 and b_l = 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Unpack

import torch
from torch import Tensor, nn

from glassformer import config as c
from glassformer.lens.residual import stack_of
from glassformer.lens.sites import LensError, output_stack
from glassformer.lens.trace import ForwardArguments, Tokens, trace
from glassformer.model import Model
from glassformer.shapes import Float, Int


@dataclass(frozen=True)
class LensReading:
    """The distribution over tokens at each of L+1 depths: after the embedding, then after each block.

    The last depth is the model's own output.
    """

    depths: tuple[str, ...]
    """The site that is read at each depth."""
    top: Int[Tensor, "N B T k"]
    """The most likely tokens, in decreasing order of probability."""
    probabilities: Float[Tensor, "N B T k"]
    entropy: Float[Tensor, "N B T"]
    """In nats."""
    divergence: Float[Tensor, "N B T"]
    """KL(final || this depth) in nats."""
    agreement: Float[Tensor, "N"]
    """Share of positions whose most likely token is already the final one."""
    logits: Float[Tensor, "N B T V"] | None
    """All logits, only if requested: (L+1)·B·T·V numbers."""


@dataclass
class TunedLens:
    """One affine map x + A_l x + b_l for each depth except the last."""

    weight: Float[Tensor, "L D D"]
    bias: Float[Tensor, "L D"]
    losses: list[float] = field(default_factory=list)
    """KL(final || lens) in nats at each training step, averaged over layers and positions."""

    @classmethod
    def plain(cls, model: Model) -> "TunedLens":
        """Return the untrained lens, which equals the logit lens."""
        L, D, weight = model.config.n_layers, model.config.d_model, model.embed.tokens.weight
        zeros = weight.new_zeros(L, D, D, dtype=torch.promote_types(weight.dtype, torch.float32))
        return cls(zeros, zeros[:, 0].clone())

    def translate(self, depth: int, stream: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Map the residual stream at a depth to the basis of the last depth."""
        if depth == len(self.weight):
            return stream
        return stream + (stream.to(self.weight) @ self.weight[depth].T + self.bias[depth]).to(stream)


def read_out(model: Model, stream: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
    """Apply the final norm, if there is one, and the output head."""
    norm = stack_of(model).norm
    return model.logits(stream if norm is None else norm(stream))


def _depths(model: Model) -> tuple[str, ...]:
    if model.head is None:
        raise LensError("this model has no head (config.head is None), so no layer can be read as tokens.")
    stack = output_stack(model.config)
    blocks = [f"{stack}blocks.{layer}.resid_post" for layer in range(model.config.n_layers)]
    return (f"{stack}blocks.0.resid_pre", *blocks)


@torch.no_grad()
def logit_lens(
    model: Model,
    tokens: Tokens,
    top: int = 5,
    *,
    tuned: TunedLens | None = None,
    logits: bool = False,
    **given: Unpack[ForwardArguments],
) -> LensReading:
    """Read the residual stream as the `top` most likely tokens at every depth; `logits` keeps all logits."""
    sites, size = _depths(model), model.config.vocab_size
    if not 1 <= top <= size:
        raise LensError(f"top={top} is outside the vocabulary of {size} tokens: use 1 to {size}.")
    if tuned is not None and tuned.weight.shape != (len(sites) - 1, model.config.d_model, model.config.d_model):
        shape = tuple(tuned.weight.shape)
        raise LensError(f"this tuned lens is for another model, its maps are {shape}: train one for this model.")
    run = trace(model, tokens, sites=sites, **given)
    final = _log_probabilities(run.logits)
    best = final.argmax(-1)
    columns: list[tuple[Tensor, ...]] = []
    kept: list[Tensor] = []
    for depth, site in enumerate(sites):  # one depth at a time: L+1 sets of logits are large
        stream = run[site] if tuned is None else tuned.translate(depth, run[site])
        read = read_out(model, stream)
        lens_log = _log_probabilities(read)
        most_likely = lens_log.topk(top, dim=-1)
        entropy = -(lens_log.exp() * lens_log).sum(-1)
        agreement = (most_likely.indices[..., 0] == best).to(lens_log).mean()
        probabilities, divergence = most_likely.values.exp(), _divergence(final, lens_log)
        columns.append((most_likely.indices, probabilities, entropy, divergence, agreement))
        if logits:
            kept.append(read)
    best_tokens, chances, entropy, divergence, agreement = (
        torch.stack(column) for column in zip(*columns, strict=True)
    )
    whole = torch.stack(kept) if logits else None
    return LensReading(sites, best_tokens, chances, entropy, divergence, agreement, whole)


def _log_probabilities(logits: Float[Tensor, "B T V"]) -> Float[Tensor, "B T V"]:
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def _divergence(final: Float[Tensor, "B T V"], lens_log: Float[Tensor, "B T V"]) -> Float[Tensor, "B T"]:
    """Return KL(final || lens) from log probabilities."""
    return (final.exp() * (final - lens_log)).sum(-1)


def train_tuned_lens(
    model: Model,
    batches: Sequence[Int[Tensor, "B T"]],
    steps: int = 150,
    seed: int = 0,
    *,
    learning_rate: float = 2e-3,
) -> TunedLens:
    """Fit the maps of a tuned lens on `batches` of tokens, in a random order determined by `seed`.

    Adam with a learning rate that decreases linearly to zero. No gradient reaches the model's parameters.
    """
    if isinstance(model.config, c.Seq2SeqConfig):
        raise LensError(
            "a tuned lens is trained on tokens only, and an encoder-decoder also needs a target: use the logit lens."
        )
    if not batches or type(steps) is not int or steps < 1:
        raise LensError(f"{len(batches)} batches and steps={steps} are too few: give at least one of each.")
    lens, sites = TunedLens.plain(model), _depths(model)
    maps = [nn.Parameter(lens.weight), nn.Parameter(lens.bias)]
    optimiser = torch.optim.Adam(maps, lr=learning_rate)
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    for step in range(steps):
        order = order or torch.randperm(len(batches), generator=generator).tolist()
        run = trace(model, batches[order.pop()], sites=sites[:-1])
        final = _log_probabilities(run.logits)
        moving = TunedLens(maps[0], maps[1])
        grads, total = [torch.zeros_like(parameter) for parameter in maps], 0.0
        for depth, site in enumerate(sites[:-1]):
            with torch.enable_grad():
                lens_log = _log_probabilities(read_out(model, moving.translate(depth, run[site])))
                loss = _divergence(final, lens_log).mean()
            for held, grad in zip(grads, torch.autograd.grad(loss, maps), strict=True):
                held.add_(grad)
            total += loss.item() / (len(sites) - 1)
        maps[0].grad, maps[1].grad = grads
        optimiser.param_groups[0]["lr"] = learning_rate * (1 - step / steps)
        optimiser.step()
        lens.losses.append(total)
    return TunedLens(maps[0].detach(), maps[1].detach(), lens.losses)
