"""The sign by which each diagnosis shows when one looks straight at it: about 0 in a healthy model, more in a sick one.

These know the base models' insides and which bug they look at. They test that the zoo is what it says it is; a doctor
has to find out without knowing.
"""

import contextlib
import copy

import torch
from torch import Tensor, nn

from tests.bugs import probes
from tests.bugs import signs_training as training
from tests.bugs.bug import Bug
from tests.bugs.watching import inputs, watch

NOISE = 2e-4
"""Float32 angles move logits of a warm model by less when all positions shift."""


class Conditioned(nn.Module):
    """An encoder-decoder with its source held fast: a decoder, for probes that know only those."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, idx: Tensor, **also: object) -> Tensor:
        return self.model(probes.rows(len(idx), 11, seed=4), idx, **also)

    def new_cache(self) -> object:
        return self.model.new_cache()


def as_decoder(bug: Bug, model: nn.Module) -> nn.Module:
    return Conditioned(model) if bug.kind == "seq2seq" else model


def causal_leak(bug: Bug, model: nn.Module) -> float:
    subject = as_decoder(bug, model.double())
    with train_mode(model, bug.special == "train"):
        return probes.future(subject, length=80 if bug.special == "long" else 24)


@contextlib.contextmanager
def train_mode(model: nn.Module, on: bool):
    model.train(on)
    yield
    model.eval()


def mask_value(bug: Bug, model: nn.Module) -> float:
    hidden = torch.ones(8, 8, dtype=torch.bool).triu(1)
    return sum(int(scores[..., hidden].isfinite().sum()) for scores in watch(model, *inputs(bug, 8)).inputs)


def over_mask(bug: Bug, model: nn.Module) -> float:
    missing = 0
    for weights in watch(model, *inputs(bug, 40)).weights:
        T, S = weights.shape[-2:]
        due = torch.ones(T, S, dtype=torch.bool)
        if T == S and bug.kind != "encoder" and T == 40:
            due = due.tril()
        missing += int((weights[..., due] == 0).sum())
    return missing


def window(bug: Bug, model: nn.Module) -> float:
    idx = probes.rows(2, 30)
    cache, wrong = model.new_cache(), 0
    seen = watch(model, idx).weights
    due = torch.arange(1, 31).clamp(max=model.cfg.window)
    wrong += sum(int(((weights > 0).sum(-1) != due).sum()) for weights in seen)
    watch(model, idx[:, :20], cache=cache)
    step = watch(model, idx[:, 20:21], cache=cache).weights
    return wrong + sum(int(((weights > 0).sum(-1) != model.cfg.window).sum()) for weights in step)


def cached(bug: Bug, model: nn.Module) -> float:
    model = as_decoder(bug, model.double())
    whole = max(probes.cached(model, 80, 3, sizes) for sizes in ((70, 1), (70, 5), (80,)))
    return max(whole, probes.cached(model, 20, 3, (5, 1)))


@torch.no_grad()
def cache_rollback(bug: Bug, model: nn.Module) -> float:
    idx, model = probes.rows(2, 20), model.double()
    _, cache = model(idx[:, :9], cache=model.new_cache())
    model(probes.rows(2, 4, seed=5), cache=cache)
    cache.crop(9)
    rest, _ = model(idx[:, 9:], cache=cache)
    return probes.gap(rest, model(idx)[:, 9:])


@torch.no_grad()
def cache_reorder(bug: Bug, model: nn.Module) -> float:
    idx, order, model = probes.rows(3, 20), torch.tensor([2, 0, 1]), model.double()
    if bug.kind == "seq2seq":
        src = probes.rows(3, 11, seed=4)
        full = model(src, idx)
        _, cache = model(src, idx[:, :9], cache=model.new_cache())
        cache.reorder(order)
        return probes.gap(model(src[order], idx[order, 9:], cache=cache)[0], full[order, 9:])
    mask = torch.cat([probes.pads(9, [0, 2, 4], "left"), torch.ones(3, 11)], 1)
    full = model(idx, attention_mask=mask)
    _, cache = model(idx[:, :9], attention_mask=mask[:, :9], cache=model.new_cache())
    cache.reorder(order)
    return probes.gap(model(idx[order, 9:], cache=cache)[0], full[order, 9:])


@torch.no_grad()
def greedy(model: nn.Module, idx: Tensor, n: int) -> Tensor:
    for _ in range(n):
        idx = torch.cat([idx, model(idx)[:, -1].argmax(-1, keepdim=True)], 1)
    return idx


def decode_select(bug: Bug, model: nn.Module) -> float:
    """Tokens that `generate` chooses differently from a plain loop over full passes."""
    idx, model = probes.rows(1, 9), model.double()
    due = greedy(model, idx, 12)[:, 9:]
    if bug.special == "right padding":
        whole = probes.rows(1, 12, seed=7)
        both = torch.cat([whole, torch.cat([idx, probes.rows(1, 3, seed=6)], 1)])
        due = greedy(model, whole, 12)[:, 12:]
        made = model.generate(both, 12, probes.pads(12, [0, 3], "right"))[:1, 12:]
    elif bug.special == "draft":
        made = model.generate(idx, 12, draft=scrambled(model))[:, 9:]
    else:
        made = model.generate(idx, 12)[:, 9:]
    return int((made != due).sum())


def scrambled(model: nn.Module) -> nn.Module:
    """A draft that is often wrong."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.tokens.weight.add_(
            0.02 * torch.randn(other.tokens.weight.shape, generator=torch.Generator().manual_seed(3))
        )
    return other


@torch.no_grad()
def state_leak(bug: Bug, model: nn.Module) -> float:
    model = model.double()
    if bug.kind == "seq2seq":
        tgt, sources = probes.rows(2, 9), [probes.rows(2, 11, seed=seed) for seed in (4, 5)]
        first = [copy.deepcopy(model)(src, tgt) for src in sources]
        return max(probes.gap(model(src, tgt), due) for src, due in zip(sources, first, strict=True))
    idx = probes.rows(2, 24)
    before, stepped = model(idx), probes.steps(model, idx, [5, 1])
    model(probes.rows(2, 100, seed=7))
    return max(probes.gap(model(idx), before), probes.gap(probes.steps(model, idx, [5, 1]), stepped))


@torch.no_grad()
def position_missing(bug: Bug, model: nn.Module) -> float:
    """1 when places cannot be distinguished: two equal (or one empty) position vectors, or flat scores in layer 0."""
    same = torch.full((1, 100), 5)
    if model.cfg.position == "learned":
        places = model.embed(same, torch.arange(100)[None])[0] - model.tokens(same)[0]
        near = torch.cdist(places, places) + torch.eye(100)
        return float((near < 1e-6).any() or (places.norm(dim=-1) < 1e-6).any())
    scores = watch(model, same).inputs[0]
    spread = (scores[0, :, -1] - scores[0, :, -1, :1]).abs().max()
    return float(spread < 1e-7)


@torch.no_grad()
def position_train_infer(bug: Bug, model: nn.Module) -> float:
    if bug.special == "train":
        idx, model = probes.rows(2, 24), model.double()
        with train_mode(model, True):
            trained = model(idx)
        return probes.gap(trained, model(idx))
    idx, model = probes.rows(2, 40), model.double()
    return int((model.generate(idx, 12, use_cache=False) != greedy(model, idx, 12)).sum())


def rope_relative(bug: Bug, model: nn.Module) -> float:
    if bug.special == "declared":
        return from_twin(bug, model)
    if bug.special == "no positions":
        return position_missing(bug, model)
    return max(0.0, probes.shifted(model.double(), by=61) - NOISE)


@torch.no_grad()
def from_twin(bug: Bug, model: nn.Module) -> float:
    """How far from the healthy model; for what no model can show alone."""
    call = inputs(bug)
    return probes.gap(model.double()(*call), bug.healthy().double()(*call))


def rope_pairing(bug: Bug, model: nn.Module) -> float:
    return from_twin(bug, model) if bug.reference else rope_relative(bug, model)


@torch.no_grad()
def rope_values(bug: Bug, model: nn.Module) -> float:
    logits = model.double()(torch.full((1, 30), 5))
    return probes.gap(logits, logits[:, :1])


def attn_scale(bug: Bug, model: nn.Module) -> float:
    """How far the ratio of softmax input and product is from the declared scale."""
    seen, due = watch(model, *inputs(bug)), model.cfg.d_head**-0.5
    worst = max((abs(scale - due) for scale in seen.scales), default=0.0)
    for scores, product in zip(seen.inputs, seen.products, strict=True):
        visible = scores.isfinite() & (product.abs() > 1e-6)
        worst = max(worst, float((scores[visible] / product[visible] - due).abs().median()))
    return worst if worst > 1e-6 else 0.0


def softmax_axis(bug: Bug, model: nn.Module) -> float:
    return max(probes.gap(w.sum(-1), torch.ones(w.shape[:-1])) for w in watch(model.double(), *inputs(bug)).weights)


def attention_weights(bug: Bug, model: nn.Module) -> float:
    """How far the output of attention is from softmax(scores) v, by the distance to the healthy twin."""
    return from_twin(bug, model)


def head_layout(bug: Bug, model: nn.Module) -> float:
    """A leak although every attention map is causal; the order of groups shows only in comparison with the twin."""
    if bug.reference:
        return from_twin(bug, model)
    future = torch.ones(24, 24, dtype=torch.bool).triu(1)
    maps = watch(model.double(), *inputs(bug)).weights
    assert all((weights[..., future] == 0).all() for weights in maps)
    return probes.future(model)


@torch.no_grad()
def after_padding(model: nn.Module) -> float:
    """Cached steps after a left-padded prompt against each row alone."""
    idx, mask, model = probes.rows(3, 16), probes.pads(11, [0, 3, 6], "left"), model.double()
    together = probes.steps(model, idx, [11, 1], attention_mask=mask)
    return max(probes.gap(together[row, n:], model(idx[row : row + 1, n:])[0]) for row, n in enumerate([0, 3, 6]))


@torch.no_grad()
def pad_leak(bug: Bug, model: nn.Module) -> float:
    model = model.double()
    if bug.kind == "seq2seq":
        src, tgt, mask = probes.rows(2, 11), probes.rows(2, 9, seed=2), probes.pads(11, [0, 4], "right")
        junk = torch.where(mask.bool(), src, probes.rows(2, 11, seed=8))
        return probes.gap(model(src, tgt, mask), model(junk, tgt, mask))
    if bug.special == "padding then cache":
        return after_padding(model)
    return probes.pad_content(model, "right" if bug.kind == "encoder" else "left")


def left_pad_position(bug: Bug, model: nn.Module) -> float:
    assert probes.pad_content(model.double()) < 1e-9  # the mask itself is right
    return after_padding(model) if bug.special else probes.padded(model)


@torch.no_grad()
def batch_variance(bug: Bug, model: nn.Module) -> float:
    model = model.double()
    if bug.special != "padding":
        return probes.neighbours(model)
    idx, mask = probes.rows(2, 14), probes.pads(14, [5, 3], "left")
    alone = model(idx[1:], attention_mask=mask[1:])[0]
    return probes.gap(model(idx, attention_mask=mask)[1, 3:], alone[3:])


@torch.no_grad()
def mask_nan(bug: Bug, model: nn.Module) -> float:
    idx, mask = probes.rows(2, 14), probes.pads(14, [5, 0], "left")
    if bug.special == "half precision":
        model = model.bfloat16()
    return int(model(idx, attention_mask=mask)[mask.bool()].isnan().sum())


def layer_reuse(bug: Bug, model: nn.Module) -> float:
    """Modules that stand at two places, or run twice in one pass; the sign is how many."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False) if ".blocks." in f".{name}"]
    runs: list[nn.Module] = []
    hooks = [b.attention.register_forward_hook(lambda m, args, out: runs.append(m)) for b in set(model.blocks)]
    model(*inputs(bug))
    for hook in hooks:
        hook.remove()
    unique = {id(p) for n, p in model.named_parameters() if n in names}
    return len(names) - len(unique) + len(runs) - len(set(runs))


@torch.no_grad()
def position_twice(bug: Bug, model: nn.Module) -> float:
    """How far what enters the first block is from token vectors and position vectors added once."""
    idx, held = inputs(bug)[0], []
    hook = model.blocks[0].register_forward_pre_hook(lambda m, args: held.append(args[0]))
    model(idx)
    hook.remove()
    positions = torch.arange(idx.shape[1])[None]
    vectors = model.table(positions) if model.table is not None else model.waves(positions)
    return probes.gap(held[0], model.tokens(idx) + vectors)


@torch.no_grad()
def low_precision(bug: Bug, model: nn.Module) -> float:
    return from_twin(bug, model)


@torch.no_grad()
def constant_logits(bug: Bug, model: nn.Module) -> float:
    """1 where other tokens give the same logits."""
    return float(probes.gap(model(probes.rows(2, 9)), model(probes.rows(2, 9, seed=4))) == 0)


SIGNS = {
    "cache_mismatch": cached,
    "decode_position": cached,
    "cache_mask": cached,
    **{sign.__name__: sign for sign in (causal_leak, mask_value, over_mask, window, cache_rollback, cache_reorder)},
    **{sign.__name__: sign for sign in (decode_select, state_leak, position_missing, position_train_infer)},
    **{sign.__name__: sign for sign in (rope_relative, rope_pairing, rope_values, attn_scale, softmax_axis)},
    "attention_weights": attention_weights,
    **{sign.__name__: sign for sign in (head_layout, pad_leak, left_pad_position, batch_variance, mask_nan)},
    **{sign.__name__: sign for sign in (training.norm_placement, training.norm_eps, training.norm_axis)},
    **{sign.__name__: sign for sign in (training.activation, training.residual_growth, training.eval_stochastic)},
    **{sign.__name__: sign for sign in (training.weight_tying, training.label_shift, training.loss_padding)},
    **{sign.__name__: sign for sign in (layer_reuse, position_twice, low_precision, constant_logits)},
    **{sign.__name__: sign for sign in (training.init_loss, training.dead_gradient)},
}
