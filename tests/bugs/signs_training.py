"""Signs of norms, activations, the residual stream, modes, weights, loss and gradients; see signs.py."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.bugs import probes
from tests.bugs.base import LayerNorm, RMSNorm
from tests.bugs.bug import Bug
from tests.bugs.watching import inputs


@torch.no_grad()
def norm_placement(bug: Bug, model: nn.Module) -> float:
    """Distance of a block from input + attention + MLP, each on a norm; 1 for a final norm that is never called."""
    held: dict[nn.Module, tuple[Tensor, Tensor]] = {}
    model = model.double()
    hooks = [m.register_forward_hook(lambda m, args, out: held.update({m: (args[0], out)})) for m in model.modules()]
    model(*inputs(bug))
    for hook in hooks:
        hook.remove()
    worst = float(any(m not in held for m in model.modules() if isinstance(m, LayerNorm | RMSNorm)))
    for block in model.blocks:
        (x, out), (_, attended), (_, fed) = held[block], held[block.attention], held[block.mlp]
        worst = max(worst, probes.gap(out, x + attended + fed))
    return worst


@torch.no_grad()
def norm_eps(bug: Bug, model: nn.Module) -> float:
    """Relative distance of each norm from the declared formula, on vectors of deviation 0.001."""
    z = 1e-3 * torch.randn(4, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    worst, eps = 0.0, model.cfg.norm_eps
    for module in model.double().modules():
        if isinstance(module, LayerNorm):
            centred = z - z.mean(-1, keepdim=True)
            due = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
        elif isinstance(module, RMSNorm):
            due = z / (z.square().mean(-1, keepdim=True) + eps).sqrt()
        else:
            continue
        worst = max(worst, probes.gap(module(z) / due, torch.ones_like(z)))
    return worst


@torch.no_grad()
def norm_axis(bug: Bug, model: nn.Module) -> float:
    """How far a normed token moves when its neighbours do."""
    x = torch.randn(3, 5, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = x.clone()
    y[1:], y[:, 1:] = 2 * y[1:], 3 * y[:, 1:]
    norms = [m for m in model.double().modules() if isinstance(m, LayerNorm | RMSNorm)]
    return max(probes.gap(norm(x)[0, 0], norm(y)[0, 0]) for norm in norms)


@torch.no_grad()
def activation(bug: Bug, model: nn.Module) -> float:
    z = torch.linspace(-3, 3, 31, dtype=torch.float64)
    due = {"gelu": F.gelu(z), "gelu_tanh": F.gelu(z, approximate="tanh"), "swiglu": F.silu(z)}
    return max(probes.gap(block.mlp.activate(z), due[model.cfg.activation]) for block in model.blocks)


@torch.no_grad()
def residual_growth(bug: Bug, model: nn.Module) -> float:
    if bug.special == "declared":
        due = model.cfg.init_std / math.sqrt(2 * model.cfg.n_layers)
        return float(max(abs(b.mlp.down.weight.std() / due - 1) for b in model.blocks) > 0.2)
    sizes: list[float] = []
    hooks = [
        b.register_forward_hook(lambda m, args, out: sizes.append(float(out.std() / args[0].std())))
        for b in model.blocks
    ]
    model(*inputs(bug))
    for hook in hooks:
        hook.remove()
    return float(max(sizes) > 1.9)


@torch.no_grad()
def eval_stochastic(bug: Bug, model: nn.Module) -> float:
    if bug.special == "train":
        model.eval().train()
        still = float(probes.repeated(model) == 0)
        model.eval()
        return still
    return probes.repeated(model.double())


def weight_tying(bug: Bug, model: nn.Module) -> float:
    if bug.special == "deepcopy":
        model = copy.deepcopy(model)
    if bug.special == "load":
        model.load_state_dict(model.state_dict())
    if bug.special == "source":  # embedded once more, and the parameter that this is
        return float(getattr(model, "source_tokens", model.tokens).weight is not model.tokens.weight)
    return float(model.head.weight is not model.tokens.weight)


@torch.no_grad()
def label_shift(bug: Bug, model: nn.Module) -> float:
    call, model = inputs(bug, 12), model.double()
    logits = model(*call)
    due = F.cross_entropy(logits[:, :-1].flatten(0, 1), call[-1][:, 1:].flatten())
    return probes.gap(model.loss(*call), due)


@torch.no_grad()
def loss_padding(bug: Bug, model: nn.Module) -> float:
    idx, mask, model = probes.rows(3, 12), probes.pads(12, [0, 3, 6], "right"), model.double()
    idx[0, 4:7], idx[1, 2:4] = 0, 5
    if bug.kind == "encoder":
        labels, real = probes.rows(3, 12, seed=2), mask.bool()
        return probes.gap(
            model.loss(idx, labels, attention_mask=mask), F.cross_entropy(model(idx, mask)[real], labels[real])
        )
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row, real in zip(idx, mask.bool(), strict=True):
        total += F.cross_entropy(model(row[real][None])[0, :-1], row[real][1:], reduction="sum")
        count += int(real.sum()) - 1
    return probes.gap(model.loss(idx, attention_mask=mask), total / count)


@torch.no_grad()
def init_loss(bug: Bug, model: nn.Module) -> float:
    if bug.special == "declared":
        return float(model.head.weight.std() > 1.5 * model.cfg.init_std)
    return max(0.0, abs(float(model.loss(probes.rows(4, 64))) - math.log(97)) - 1.5)


def dead_gradient(bug: Bug, model: nn.Module) -> float:
    """Parameters without gradient, and those the healthy twin has beyond."""
    logits = model(torch.arange(128)[None] % 97)
    (logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
    named = [(n, p) for n, p in model.named_parameters() if not n.endswith("k_proj.bias")]
    dead = sum(p.grad is None or float(p.grad.abs().max()) == 0 for _, p in named)
    return dead + len(list(bug.healthy().parameters())) - len(list(model.parameters()))
