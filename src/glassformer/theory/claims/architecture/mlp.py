"""Multilayer perceptrons and Transformers: a block that attends only to itself is an MLP on each token."""

import itertools
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from glassformer import config as c
from glassformer.finding import Finding
from glassformer.lens import trace
from glassformer.lens.figure import Figure
from glassformer.model import EncoderLM, n_parameters
from glassformer.reference import random_params
from glassformer.reference.arrays import Array, Params, select_prefix
from glassformer.reference.ops import activate, layer_norm, linear
from glassformer.theory.claims.claim import Lab, claim, figure
from glassformer.theory.claims.rounding import max_difference
from glassformer.theory.claims.small_models import SEQUENCE, dependence, encoder, model_with, refusal, small_config
from glassformer.theory.claims.weights.layer import normal, random_layer, run
from glassformer.theory.claims.weights.rational import random_matrix

N = 5
ORDERS = list(itertools.permutations(range(N)))
LENGTHS = (4, 8, 16)


def _config() -> c.ModelConfig:
    return small_config(c.EncoderConfig, 2, position=c.NoPosition())


def _only_itself(lab: Lab, n: int = N) -> Tensor:
    """(1,T,T): the identity; under the control also the token before."""
    mask = torch.eye(n, dtype=torch.bool)
    return (mask | mask.roll(1, 0).tril() if lab.broken else mask)[None]


def token_by_token(params: Params, token: int) -> Array:
    """Return the logits of one token as an MLP with residual connections: no other token, no softmax."""
    x = params["embed.tokens.weight"][token]
    for layer in range(2):
        own = select_prefix(params, f"encoder.blocks.{layer}")
        norm = select_prefix(own, "norm_attention")
        x = x + linear(
            own, "attention.o", linear(own, "attention.v", layer_norm(x, norm["weight"], norm["bias"], 1e-5))
        )
        norm = select_prefix(own, "norm_feedforward")
        hidden = linear(own, "feedforward.up", layer_norm(x, norm["weight"], norm["bias"], 1e-5))
        x = x + linear(own, "feedforward.down", activate("gelu_tanh", hidden))
    x = layer_norm(x, params["encoder.norm.weight"], params["encoder.norm.bias"], 1e-5)
    logits: Array = params["embed.tokens.weight"] @ x
    return logits


class Flattened:
    """An MLP over a whole text of n vectors at once: (n D) -> hidden -> (n D)."""

    def __init__(self, n: int, width: int, hidden: int, rng: np.random.Generator):
        self.size = n * width
        self.first, self.second = rng.standard_normal((hidden, self.size)), rng.standard_normal((self.size, hidden))

    def __call__(self, x: Array) -> Array:
        out: Array = (self.second @ np.tanh(self.first @ x.ravel())).reshape(x.shape)
        return out


@claim("mlp-vs-transformer")
def mlp_vs_transformer(lab: Lab) -> Iterator[Finding]:
    yield from _identity_mask(lab)
    yield from _order(lab)
    yield from _sizes(lab)
    yield from _nonlinear(lab)
    yield _hidden_states(lab)
    model = encoder(seed=lab.seed)
    least = float(
        trace(model, torch.tensor([SEQUENCE[:N]])).stack("blocks.*.attention.pattern").diagonal(0, -2, -1).min()
    )
    yield lab.numerical("weight on oneself", least, None, low=1e-12)


def _identity_mask(lab: Lab) -> Iterator[Finding]:
    config = _config()
    params = random_params(config, lab.seed, 0.5)
    model, tokens, mask = model_with(config, params), torch.tensor([SEQUENCE[:N]]), _only_itself(lab)
    seen = trace(model, tokens, mask=mask)
    pattern = seen.stack("blocks.*.attention.pattern")
    same = torch.equal(pattern, torch.eye(N, dtype=torch.float64).expand_as(pattern))
    yield lab.exact("A = I", same)
    jacobian = dependence(model, tokens, mask=mask)
    wrong = int(((jacobian != 0) != torch.eye(N, dtype=torch.bool)).sum())
    yield lab.exhaustive("derivatives", wrong, N * N)
    expected = np.stack([token_by_token(params, int(token)) for token in tokens[0]])
    gap = max_difference(seen.logits[0].numpy(), expected)
    yield lab.numerical("an MLP, token by token", gap, 1e-12)


def _order(lab: Lab) -> Iterator[Finding]:
    config = _config()
    model, tokens, orders = (
        model_with(config, random_params(config, lab.seed, 0.5)),
        torch.tensor(SEQUENCE[:N]),
        torch.tensor(ORDERS),
    )
    with torch.no_grad():
        moved = (model(tokens[orders]) - model(tokens[None])[0][orders]).abs().amax((1, 2))
    follows = int((moved < 1e-11).sum())
    yield lab.exhaustive("Transformer and order", len(ORDERS) - follows, len(ORDERS))
    rng = lab.rng()
    flat, x = Flattened(N, 3, 20, rng), rng.standard_normal((N, 3))
    passing = sum(np.abs(flat(x[list(order)]) - flat(x)[list(order)]).max() < 1e-11 for order in ORDERS)
    yield lab.exact("MLP and order", int(passing) == 1, passing=int(passing))
    yield lab.exact("MLP and length", bool(refusal(flat, np.zeros((N + 1, 3)))))


def _sizes(lab: Lab) -> Iterator[Finding]:
    width = 8
    ours = {n: n_parameters(encoder(position=c.NoPosition(), max_len=n)) for n in LENGTHS}
    model = encoder(seed=lab.seed, position=c.NoPosition())
    with torch.no_grad():
        runs = all(model(torch.zeros(1, n, dtype=torch.long)).shape[1] == n for n in LENGTHS)
    dense = {n: n_parameters(torch.nn.Linear(n * width, n * width, device="meta")) for n in LENGTHS}
    squares = [dense[n] == (n * width) ** 2 + n * width for n in LENGTHS]
    holds = runs and len(set(ours.values())) == 1 and all(squares)
    yield lab.exact("parameters by length", holds, transformer=ours, dense=dense)
    error = refusal(small_config, d_model=10, attention=c.Attention(4))
    yield lab.exact("widths are not arbitrary", bool(error), error=error)


def _nonlinear(lab: Lab) -> Iterator[Finding]:
    rng = lab.rng()
    first, second, x = random_matrix(rng, 4, 3), random_matrix(rng, 2, 4), random_matrix(rng, 3, 5)
    same = bool((second @ (first @ x) == (second @ first) @ x).all())
    yield lab.exact("linear layers collapse", same)
    attention, tokens = random_layer(lab.torch_rng(), 8, 2, 4, 4), normal(lab.torch_rng(1), N, 8)
    bend = max_difference(run(attention, 2 * tokens)["out"], 2 * run(attention, tokens)["out"])
    yield lab.numerical("attention bends", bend, None, low=1e-3)


def _hidden_states(lab: Lab) -> Finding:
    """Replace the input of block 1: the tokens below it no longer matter."""
    model, one = encoder(seed=lab.seed), torch.tensor([SEQUENCE[:N]])
    other = (one + 1) % 7
    held = trace(model, one, sites="blocks.1.resid_pre")["blocks.1.resid_pre"]
    runs = [trace(model, tokens, edits={"blocks.1.resid_pre": lambda site, value: held}) for tokens in (one, other)]
    apart = max_difference(trace(model, one).logits, trace(model, other).logits)
    holds = torch.equal(runs[0].logits, runs[1].logits) and apart > 1e-6
    return lab.exact("hidden states read hidden states", holds, without_the_edit=apart)


@figure("mlp-vs-transformer", "Which output token depends on which input token", height=3.0)
def draw_sparsity(lab: Lab, fig: Figure) -> None:
    from glassformer.lens.figures.attention import draw_map

    model, tokens = encoder(seed=lab.seed), torch.tensor([SEQUENCE[:N]])
    assert isinstance(model, EncoderLM)
    rng = lab.rng()
    flat, x = Flattened(N, 3, 20, rng), rng.standard_normal((N, 3))
    slope = 1 - np.tanh(flat.first @ x.ravel()) ** 2
    dense = np.abs((flat.second * slope) @ flat.first).reshape(N, 3, N, 3).max((1, 3))
    panels = {
        "Transformer": dependence(model, tokens).numpy(),
        "Transformer, identity mask": dependence(model, tokens, mask=_only_itself(lab)).numpy(),
        "MLP on the flattened text": dense,
    }
    axes = fig.canvas.subplots(1, 3, sharey=True)
    for ax, (title, values) in zip(axes, panels.items(), strict=True):
        shown = draw_map(ax, np.where(values == 0.0, np.nan, values / values.max()))
        ax.set(title=title, xlabel="input", xticks=range(N), yticks=range(N))
    axes[0].set_ylabel("output")
    fig.canvas.colorbar(
        shown, ax=axes, location="bottom", shrink=0.6, label="derivative over the largest (white: exactly 0)"
    )
