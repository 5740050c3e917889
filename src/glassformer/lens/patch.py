"""Change what a model computes at a site: ablation, activation patching, path patching.

    patch(model, tokens, {"blocks.1.attention.heads": zero(heads=[2])})             # logits without head 1.2
    patch_effects(model, clean, corrupt, answer=5, wrong=7).effects                 # (L,H,T), 0 = corrupt, 1 = clean

An edit is any function of a site's name and value. The edits of this module replace the whole site, or only some
`heads`, `positions` (for keys and values: key positions) and `rows` (batch elements). Replacing a site by its recorded
value changes nothing, bit for bit, if both runs request the same scores and patterns: a layer that computes these uses
explicit attention, which rounds differently from the fused kernel.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor

from glassformer.lens.residual import FrozenNorm, logit_difference, one_per_row, stack_of
from glassformer.lens.sites import LensError, output_stack, select, site_name, sites_of
from glassformer.lens.trace import (
    Edit,
    ForwardArguments,
    Recorder,
    Tokens,
    Trace,
    evaluating,
    read_tokens,
    require_equal_length,
    run_hidden,
    trace,
)
from glassformer.model import Model
from glassformer.shapes import Float, Int, Shaped

Some = Sequence[int] | None


@dataclass(frozen=True)
class Intervention:
    """Replace a site, or the given heads, positions and rows of it, by the value that `new` returns."""

    new: Edit
    heads: Some = None
    positions: Some = None
    rows: Some = None

    def __call__(self, site: str, value: Tensor) -> Tensor:
        new = _fitted(site, self.new(site, value).to(value.device), value)
        chosen: Tensor | None = None
        for what, indices, axis in (
            ("row", self.rows, 0),
            ("head", self.heads, 1 if value.dim() == 4 else None),
            ("position", self.positions, value.dim() - 2),
        ):
            if indices is not None:
                mask = _axis_mask(site, what, indices, axis, value)
                chosen = mask if chosen is None else chosen & mask
        return new if chosen is None else torch.where(chosen, new, value)


def _fitted(site: str, new: Tensor, value: Tensor) -> Tensor:
    if new.shape == value.shape:
        return new
    try:
        return new.expand_as(value)
    except RuntimeError:
        raise LensError(
            f"{site} has shape {tuple(value.shape)} and its replacement {tuple(new.shape)}: "
            "patch between texts of the same length and number of rows (or from one row)."
        ) from None


def _axis_mask(site: str, what: str, indices: Sequence[int], axis: int | None, value: Tensor) -> Tensor:
    """Return a mask that is True at `indices` of one axis and broadcasts over the other axes."""
    if axis is None:
        raise LensError(f"{site} has no heads, its shape is {tuple(value.shape)}: leave heads= out.")
    size = value.shape[axis]
    for index in indices:
        if not -size <= index < size:
            raise LensError(f"{what} {index} does not exist at {site}, which has {size}: use 0 to {size - 1}.")
    mask = torch.zeros(size, dtype=torch.bool, device=value.device)
    mask[list(indices)] = True
    return mask.view(*(size if i == axis else 1 for i in range(value.dim())))


def zero(heads: Some = None, positions: Some = None, rows: Some = None) -> Intervention:
    """Zero ablation."""
    return Intervention(lambda site, value: torch.zeros_like(value), heads, positions, rows)


def mean(
    of: Trace | None = None,
    over: Sequence[str] = ("rows", "positions"),
    heads: Some = None,
    positions: Some = None,
    rows: Some = None,
) -> Intervention:
    """Mean ablation: replace by the mean over `over` (rows, positions or both) of this run or of the run `of`."""
    unknown = set(over) - {"rows", "positions"}
    if unknown or not over:
        raise LensError(f"over={tuple(over)!r} is not supported: average over 'rows', 'positions' or both.")

    def averaged(site: str, value: Tensor) -> Tensor:
        source = value if of is None else of[site]
        if not source.is_floating_point():
            raise LensError(f"{site} contains integers, whose mean the model cannot use: use value().")
        axes = [axis for name, axis in (("rows", 0), ("positions", source.dim() - 2)) if name in over]
        return source.mean(axes, keepdim=True).expand(_broadcast(source, value, axes))

    return Intervention(averaged, heads, positions, rows)


def _broadcast(source: Tensor, value: Tensor, axes: list[int]) -> list[int]:
    """Return the shape of the mean after its averaged axes are expanded to the sizes of this run."""
    return [value.shape[i] if i in axes else source.shape[i] for i in range(source.dim())]


def resample(run: Trace, seed: int = 0, heads: Some = None, positions: Some = None, rows: Some = None) -> Intervention:
    """Resample ablation: replace each row by a random row of another run, the same rows at every site for one seed."""

    def drawn(site: str, value: Tensor) -> Tensor:
        source = run[site]
        generator = torch.Generator().manual_seed(seed)
        index = torch.randint(source.shape[0], (value.shape[0],), generator=generator)
        return source[index.to(source.device)]

    return Intervention(drawn, heads, positions, rows)


def value(tensor: Shaped[Tensor, "..."], heads: Some = None, positions: Some = None, rows: Some = None) -> Intervention:
    """Replace by the given tensor, broadcast to the shape of the site."""
    return Intervention(lambda site, value: tensor, heads, positions, rows)


def from_run(
    run: Trace, site: str | None = None, heads: Some = None, positions: Some = None, rows: Some = None
) -> Intervention:
    """Replace by the value of another run at the same site, or at `site`."""
    return Intervention(lambda name, value: run[site or name], heads, positions, rows)


def patch(
    model: Model, tokens: Tokens, edits: Mapping[str, Edit], *, grad: bool = False, **given: Unpack[ForwardArguments]
) -> Float[Tensor, "B T V"]:
    """Return the logits of a run with edited sites (names or patterns). `trace(..., edits=...)` records such a run.

    >>> from glassformer.lens import zero
    >>> gf.patch(gf.load("bard"), [[1, 2, 3]], {"blocks.1.attention.heads": zero(heads=[2])}).shape
    torch.Size([1, 3, 65])
    """
    return trace(model, tokens, sites=(), edits=edits, grad=grad, **given).logits


@dataclass(frozen=True)
class EffectMap:
    """How much of the logit difference is restored when one entry of the corrupt run is set to its clean value.

    0 is the corrupt run's difference, 1 the clean run's; values below 0 and above 1 are possible.
    """

    effects: Shaped[Tensor, "L ..."]
    letters: str
    """The axes of `effects`: L,H,T (G instead of H for keys and values), L,T or L,H."""
    sites: tuple[str, ...]
    """The patched site of each layer."""
    clean: float
    corrupt: float
    """Logit differences of the two runs, averaged over the batch."""


@torch.no_grad()
def patch_effects(
    model: Model,
    clean: Tokens,
    corrupt: Tokens,
    answer: int | Int[Tensor, "B"],
    wrong: int | Int[Tensor, "B"],
    site: str = "attention.heads",
    *,
    layers: Sequence[int] | None = None,
    each_position: bool = True,
    position: int = -1,
    batch: int = 64,
    **given: Unpack[ForwardArguments],
) -> EffectMap:
    """Activation patching from a clean into a corrupt text of the same length (Meng et al. 2022; Wang et al. 2022).

    `site` is the site of a block ("attention.heads", "resid_pre", "feedforward.out", ...) or a full pattern
    ("encoder.blocks.*.resid_pre"). For each layer, head and position of it, the model runs on `corrupt` with only that
    entry set to its clean value:

        effect = (difference(patched) - difference(corrupt)) / (difference(clean) - difference(corrupt)),

    with difference = logit[answer] - logit[wrong] at `position`, averaged over the batch. `each_position=False` patches
    all positions of a head together. `batch` is the number of patched sequences in one forward pass.
    """
    names = _layer_sites(model, site, layers)
    sources = _pair(model, clean, corrupt, given)
    metric = _LogitDifference.of(model, len(sources[0]), answer, wrong, position)
    kept, other = (Recorder(names) for _ in sources)
    with evaluating(model):
        high, low = metric.measure(sources[0], kept, given), metric.measure(sources[1], other, given)
        gap = float(high.mean() - low.mean())
        if abs(gap) <= 1e-6 * max(1.0, float(high.abs().max())):
            raise LensError(
                f"both texts give the logit difference {float(low.mean()):.4g}: there is nothing to restore, "
                "choose texts that the model answers differently."
            )
        both = [(name, (kept.values[name], other.values[name])) for name in names]
        rows = [metric.sweep(sources[1], low.mean(), *run, each_position, batch, given) for run in both]
    effects = (torch.stack(rows) - low.mean()) / gap
    has_heads, heads = kept.values[names[0]].dim() == 4, sites_of(model)[names[0]].letters.split(",")[1]
    letters = "L" + (f",{heads}" if has_heads else "") + (",T" if each_position or not has_heads else "")
    return EffectMap(effects, letters, tuple(names), float(high.mean()), float(low.mean()))


def _pair(model: Model, clean: Tokens, corrupt: Tokens, given: ForwardArguments) -> tuple[Tensor, Tensor]:
    """Return the two texts as token ids of one shape. `given` is used for both; its target is encoded here, once."""
    if given.get("cache") is not None:
        raise LensError("patching runs the model several times, and a cache would grow each time: leave it out.")
    first, second = (read_tokens(model, tokens, given.get("tokenizer")) for tokens in (clean, corrupt))
    require_equal_length(first.shape[1], second.shape[1])
    if len(first) != len(second):
        raise LensError(f"there are {len(first)} clean and {len(second)} corrupt texts: give the same number of both.")
    if "target" in given:
        given["target"] = read_tokens(model, given["target"], given.get("tokenizer"))
    return first, second


def _layer_sites(model: Model, site: str, layers: Sequence[int] | None) -> list[str]:
    names = select(model.config, site if "blocks." in site else f"{output_stack(model.config)}blocks.*.{site}")
    if layers is None:
        return names
    if not layers or not all(0 <= layer < len(names) for layer in layers):
        raise LensError(f"layers={list(layers)} is outside the model: give one or more of 0 to {len(names) - 1}.")
    return [names[layer] for layer in layers]


@dataclass(frozen=True)
class _LogitDifference:
    """The logit difference measured after every run; the output head is applied at one position only."""

    model: Model
    answers: Int[Tensor, "B"]
    others: Int[Tensor, "B"]
    position: int

    @classmethod
    def of(
        cls, model: Model, rows: int, answer: int | Tensor, wrong: int | Tensor, position: int
    ) -> "_LogitDifference":
        return cls(model, one_per_row(model, answer, rows), one_per_row(model, wrong, rows), position)

    def measure(self, tokens: Tensor, tap: Recorder, given: ForwardArguments) -> Float[Tensor, "B"]:
        hidden = run_hidden(self.model, tokens, tap, **given)
        if not -hidden.shape[1] <= self.position < hidden.shape[1]:
            raise LensError(f"position {self.position} is outside a text of {hidden.shape[1]} tokens: give one inside.")
        at = self.position % hidden.shape[1]
        logits = self.model.logits(hidden[:, at : at + 1])[:, 0]
        copies = len(logits) // len(self.answers)  # the texts may be repeated, each copy with another patch
        return logit_difference(logits, self.answers.repeat(copies), self.others.repeat(copies))

    def sweep(
        self,
        tokens: Int[Tensor, "B T"],
        low: Float[Tensor, ""],
        site: str,
        runs: tuple[Tensor, Tensor],
        each_position: bool,
        batch: int,
        given: ForwardArguments,
    ) -> Shaped[Tensor, "..."]:
        """Return the mean difference after patching each entry, (H,T), (H,) or (T,); `low` where both runs agree."""
        clean, corrupt = runs
        B, axes = len(tokens), clean.dim() - 2 if each_position or clean.dim() == 3 else 1
        differs = (clean != corrupt).flatten(axes + 1).any(-1).any(0)
        entries = differs.flatten().nonzero()[:, 0]
        results = low.repeat(differs.numel())
        for some in entries.split(max(1, batch // B)):
            chosen = torch.zeros(len(some), differs.numel(), dtype=torch.bool, device=clean.device)
            chosen[torch.arange(len(some)), some] = True
            chosen = chosen.view(len(some), *differs.shape, *[1] * (clean.dim() - 1 - axes))  # (n, H, T, 1)
            edit = _Mix(chosen.repeat_interleave(B, 0), clean.repeat(len(some), *[1] * (clean.dim() - 1)))
            many = {key: _repeated(held, B, len(some)) for key, held in given.items()}
            tap = Recorder((), {site: edit})
            answers = self.measure(tokens.repeat(len(some), 1), tap, many)  # type: ignore[arg-type]
            results[some] = answers.view(len(some), B).mean(1)
        return results.view(differs.shape)


@dataclass(frozen=True)
class _Mix:
    """An edit that may differ between batch elements: `clean` where `chosen` is True."""

    chosen: Tensor
    clean: Tensor

    def __call__(self, site: str, value: Tensor) -> Tensor:
        return torch.where(self.chosen, self.clean, value)


def _repeated(held: Any, rows: int, times: int) -> Any:
    """Repeat a tensor that has one entry per row; a tensor shared by all rows is returned unchanged."""
    if isinstance(held, Tensor) and held.shape[0] == rows:
        return held.repeat(times, *[1] * (held.dim() - 1))
    return held


@dataclass(frozen=True)
class PathEffect:
    """The effect of one path: `change` is the logit difference with this path corrupted minus the clean one."""

    change: Float[Tensor, "B"]
    clean: Float[Tensor, "B"]
    corrupt: Float[Tensor, "B"]

    @property
    def share(self) -> float:
        """Return the share of the total change from clean to corrupt that this path causes."""
        return float(self.change.mean() / (self.corrupt - self.clean).mean())


@torch.no_grad()
def path_effect(
    model: Model,
    clean: Tokens,
    corrupt: Tokens,
    answer: int | Int[Tensor, "B"],
    wrong: int | Int[Tensor, "B"],
    sender: tuple[str, int | None],
    receivers: Mapping[str, Some] | None = None,
    *,
    position: int = -1,
    freeze_norm: bool = False,
    **given: Unpack[ForwardArguments],
) -> PathEffect:
    """Path patching: the effect of one head (or feed-forward) on the logit difference through `receivers` only.

    `sender` is a site that writes to the residual stream and its head, ("blocks.0.attention.heads", 3) or
    ("blocks.1.feedforward.out", None). `receivers` maps sites to heads ({"blocks.2.attention.q": [1]}); None selects
    the whole site. First the clean run is repeated with the sender's corrupt value, while every other head and
    feed-forward keeps its clean value. Then the receivers' values of that run are put into a clean run (Wang et al.
    2022; Goldowsky-Dill et al. 2023). Without receivers, the path leads directly to the logits. With `freeze_norm` the
    final norm keeps the clean run's statistics; the change is then the sender's direct logit attribution, corrupt minus
    clean.
    """
    writers = [name for name in sites_of(model) if name.endswith((".heads", "feedforward.out"))]
    site, head = site_name(model.config, sender[0]), sender[1]
    receivers = None if receivers is None else {site_name(model.config, name): h for name, h in receivers.items()}
    if site not in writers:
        raise LensError(f"{site} does not write to the residual stream: send from a site .heads or feedforward.out.")
    if freeze_norm and receivers is not None:
        raise LensError("freeze_norm applies to the direct path only, and receivers were given: leave one of them out.")
    texts = _pair(model, clean, corrupt, given)
    metric = _LogitDifference.of(model, len(texts[0]), answer, wrong, position)
    with evaluating(model):
        before = Recorder([*writers, _last_stream(model)])
        other = Recorder([site])
        high, low = metric.measure(texts[0], before, given), metric.measure(texts[1], other, given)
        edits: dict[str, Edit] = {name: _constant(before.values[name]) for name in writers}
        edits[site] = Intervention(_constant(other.values[site]), heads=None if head is None else [head])
        if freeze_norm:
            edits |= _frozen_final(model, before.values[_last_stream(model)])
        through = Recorder(select(model.config, receivers or ()), edits)
        result = metric.measure(texts[0], through, given)
        if receivers is not None:
            arrived = {name: Intervention(_constant(through.values[name]), heads=h) for name, h in receivers.items()}
            result = metric.measure(texts[0], Recorder((), arrived), given)
    return PathEffect(result - high, high, low)


def _constant(tensor: Tensor) -> Edit:
    return lambda site, value: tensor


def _last_stream(model: Model) -> str:
    """Return the site that is the input of the final norm."""
    return f"{output_stack(model.config)}blocks.{model.config.n_layers - 1}.resid_post"


def _frozen_final(model: Model, stream: Float[Tensor, "B T D"]) -> dict[str, Edit]:
    """Return edits that make the final norm use the statistics of `stream`."""
    norm = stack_of(model).norm
    if norm is None:
        raise LensError("with placement='post' there is no final norm to freeze: leave freeze_norm out.")
    frozen, recorded = FrozenNorm.at(norm, stream), {}

    def record(site: str, value: Tensor) -> Tensor:
        recorded["stream"] = value
        return value

    final = f"{output_stack(model.config)}final"
    return {_last_stream(model): record, final: lambda site, value: frozen(recorded["stream"])}
