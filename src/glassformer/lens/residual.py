"""Decompose the residual stream exactly into the contributions of the embedding, each head and each feed-forward.

Attention's output is a sum over heads, `out = sum_h heads_h W_o[h] + b_o`, and a block adds its sublayers' outputs to
the residual stream. So with pre-norm and parallel placement the residual stream at any depth is the sum of these
outputs (Elhage et al. 2021). A norm on the way (every norm with post-norm placement, the final norm before the head) is
affine once its statistics are frozen at those of the run. With sigma the recorded scale,

    LayerNorm(x) = w (x - mean(x)) / sigma + b,   so   sum_i c_i  ->  sum_i w (c_i - mean(c_i)) / sigma + b
    RMSNorm(x)   = w x / sigma,                   so   sum_i c_i  ->  sum_i w c_i / sigma

Each contribution passes through the norm separately, and the bias is one more contribution. The sums are exact.
Freezing ignores that a norm would have had a different scale without a contribution.
"""

from dataclasses import dataclass, field
from typing import Unpack

import torch
from torch import Tensor

from glassformer.finding import Finding
from glassformer.lens.sites import LensError, output_stack, site_name, sites_of, stacks_of
from glassformer.lens.trace import ForwardArguments, Tokens, Trace, trace
from glassformer.model import DecoderLM, EncoderLM, Model, Seq2Seq
from glassformer.model.attention import Attention
from glassformer.model.block import Block, PostNormBlock, Stack
from glassformer.model.layers import LayerNorm, RMSNorm
from glassformer.model.transformer import Head
from glassformer.shapes import Float, Int

BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-4}
"""Largest allowed error of a sum, relative to the largest entry if that exceeds 1. In half precision: 0.05."""


@dataclass(frozen=True)
class FrozenNorm:
    """A norm with the statistics of one input: `part -> weight * (part - mean(part)) / sigma` and a constant bias."""

    weight: Float[Tensor, "D"]
    sigma: Float[Tensor, "B T 1"]
    centred: bool
    bias: Float[Tensor, "D"] | None

    @classmethod
    def at(cls, norm: LayerNorm | RMSNorm, x: Float[Tensor, "B T D"]) -> "FrozenNorm":
        if isinstance(norm, LayerNorm):
            return cls(norm.weight, (x.var(-1, correction=0, keepdim=True) + norm.eps).sqrt(), True, norm.bias)
        return cls(norm.weight, (x.square().mean(-1, keepdim=True) + norm.eps).sqrt(), False, None)

    def linear(self, part: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:
        """Apply the norm to one contribution, without the bias."""
        return self.weight * (part - part.mean(-1, keepdim=True) if self.centred else part) / self.sigma

    def __call__(self, x: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:
        return self.linear(x) if self.bias is None else self.linear(x) + self.bias


@dataclass(frozen=True)
class Decomposition:
    """`parts[i]` is the contribution of `names[i]` to the residual stream at `site`; the parts sum to `total`."""

    site: str
    names: tuple[str, ...]
    parts: Float[Tensor, "C B T D"]
    total: Float[Tensor, "B T D"]
    finding: Finding

    def __getitem__(self, name: str) -> Float[Tensor, "B T D"]:
        return self.parts[self.names.index(name)]

    def norms(self) -> Float[Tensor, "C B T"]:
        """Return the Euclidean norm of each contribution."""
        return self.parts.norm(dim=-1)


@torch.no_grad()
def decompose(
    model: Model,
    tokens: Tokens,
    at: str | None = None,
    *,
    position: int | Int[Tensor, "B"] | None = None,
    **given: Unpack[ForwardArguments],
) -> Decomposition:
    """Decompose the residual stream at site `at` (default: after the last block) into named contributions.

    `at` is embed, final, or a block's resid_pre, resid_mid or resid_post. The names are `embed`,
    `blocks.I.attention.head.J`, `blocks.I.attention.bias` (of the output projection), the same under `cross`,
    `blocks.I.feedforward`, and the bias of every norm on the way. `position` keeps one position per sequence (T = 1).
    """
    config = model.config
    prefix = output_stack(config)
    at = site_name(config, at or f"{prefix}blocks.{stacks_of(config)[prefix] - 1}.resid_post")
    if not at.endswith((".resid_pre", ".resid_mid", ".resid_post", "embed", "final")):
        raise LensError(f"{at} is not the residual stream: give embed, final, or a block's resid_pre, _mid or _post.")
    prefix = "encoder." if at.startswith("encoder.") else prefix
    wanted = [name for name in sites_of(config) if name.startswith(prefix) and name.endswith(_NEEDED)]
    run = trace(model, tokens, sites=wanted, **given)
    walk = _Walk(model, run, prefix, _positions(run, prefix, position))
    walk.to(at)
    parts, total = torch.stack(walk.parts), walk.read(at)
    return Decomposition(at, tuple(walk.names), parts, total, _sums("decomposition-sums-to-stream", parts, total))


_NEEDED = ("embed", "resid_pre", "resid_mid", "resid_post", ".heads", ".out", "final")


def _positions(run: Trace, prefix: str, position: int | Tensor | None) -> Tensor | None:
    """Return one checked position per sequence; None means every position."""
    if position is None:
        return None
    rows, length = run[f"{prefix}embed"].shape[:2]
    positions = torch.as_tensor(position, device=run.tokens.device).expand(rows)
    if int(positions.min()) < -length or int(positions.max()) >= length:
        raise LensError(f"position {position} is outside a text of {length} tokens: use {-length} to {length - 1}.")
    return positions % length


def _sums(id: str, parts: Tensor, total: Tensor) -> Finding:
    gap = float((parts.sum(0) - total).abs().max()) / max(1.0, float(total.abs().max()))
    why = f"the contributions sum to the model's own value, up to rounding in {total.dtype}"
    remedy = "the decomposition misses a contribution to the residual stream: compare site by site."
    return Finding.judge(id, gap, BOUNDS.get(total.dtype, 0.05), why, remedy, terms=len(parts))


class _Walk:
    """Walks through a stack: adds each sublayer's output and passes all contributions through the norms on the way."""

    def __init__(self, model: Model, run: Trace, prefix: str, positions: Tensor | None):
        self.run, self.prefix, self.positions, self.placement = run, prefix, positions, model.config.placement
        self.stack = stack_of(model, prefix)
        self.names: list[str] = []
        self.parts: list[Tensor] = []

    def read(self, site: str) -> Tensor:
        """Return a recorded tensor at the chosen positions."""
        value = self.run[site]
        if self.positions is None:
            return value
        time = value.dim() - 2
        index = self.positions.view(-1, *[1] * (value.dim() - 1)).expand(*value.shape[:time], 1, value.shape[-1])
        return value.gather(time, index)

    def to(self, at: str) -> None:
        """Collect every contribution to the residual stream at site `at`."""
        self._add(f"{self.prefix}embed", self.read(f"{self.prefix}embed"))
        if at.endswith("embed"):
            return
        for layer, block in enumerate(self.stack.blocks):
            name = f"{self.prefix}blocks.{layer}."
            if at == f"{name}resid_pre":
                return
            assert isinstance(block, Block)
            self._block(name, block, stop=at == f"{name}resid_mid")
            if at.startswith(name):
                return
        if self.stack.norm is not None:
            self.freeze(f"{self.prefix}norm", FrozenNorm.at(self.stack.norm, self.read(f"{name}resid_post")))

    def _block(self, name: str, block: Block, stop: bool) -> None:
        x = self.read(f"{name}resid_pre")
        x = self._attend(f"{name}attention", block.attention, x)
        if isinstance(block, PostNormBlock):
            x = self._normed(f"{name}norm_attention", block.norm_attention, x)
        if block.cross is not None:
            x = self._attend(f"{name}cross", block.cross, x)
            if isinstance(block, PostNormBlock) and block.norm_cross is not None:
                x = self._normed(f"{name}norm_cross", block.norm_cross, x)
        if stop or f"{name}feedforward.out" not in self.run:
            return
        out = self.read(f"{name}feedforward.out")
        self._add(f"{name}feedforward", out)
        if isinstance(block, PostNormBlock) and block.norm_feedforward is not None:
            self._normed(f"{name}norm_feedforward", block.norm_feedforward, x + out)

    def _attend(self, name: str, attention: Attention, x: Tensor) -> Tensor:
        """Add each head's part of attention's output. Return the residual stream with the whole output added."""
        for head, part in enumerate(head_outputs(attention, self.read(f"{name}.heads"))):
            self._add(f"{name}.head.{head}", part)
        if attention.o.bias is not None:
            self._add(f"{name}.bias", attention.o.bias.expand_as(x))
        return x + self.read(f"{name}.out")

    def _normed(self, name: str, norm: LayerNorm | RMSNorm, x: Tensor) -> Tensor:
        frozen = FrozenNorm.at(norm, x)
        self.freeze(name, frozen)
        return frozen(x)

    def freeze(self, name: str, norm: FrozenNorm) -> None:
        """Pass every contribution so far through a norm; its bias becomes one more contribution."""
        self.parts = [norm.linear(part) for part in self.parts]
        if norm.bias is not None:
            self._add(f"{name}.bias", norm.bias.expand_as(self.parts[0]))

    def _add(self, name: str, part: Tensor) -> None:
        self.names.append(name)
        self.parts.append(part)


def stack_of(model: Model, prefix: str = "") -> Stack:
    """Return the stack whose sites start with `prefix`; for an encoder-decoder without a prefix, the decoder."""
    if isinstance(model, EncoderLM) or (isinstance(model, Seq2Seq) and prefix == "encoder."):
        return model.encoder
    assert isinstance(model, DecoderLM | Seq2Seq)
    return model.decoder


def head_outputs(attention: Attention, heads: Float[Tensor, "B H T U"]) -> Float[Tensor, "H B T D"]:
    """Return heads_h W_o[h], what each head adds to the residual stream, without the output projection's bias."""
    weight = attention.o.weight.unflatten(1, (attention.n_heads, -1))  # (D, H, U)
    return torch.einsum("bhtu,dhu->hbtd", heads, weight)


@dataclass(frozen=True)
class Attribution:
    """`values[i]` is what `names[i]` adds to the logit (or logit difference) of each sequence; they sum to `logit`.

    Only direct effects are attributed: an effect through a later head counts for that head. `note` states what was
    frozen.
    """

    names: tuple[str, ...]
    values: Float[Tensor, "C B"]
    logit: Float[Tensor, "B"]
    finding: Finding
    note: str

    def __getitem__(self, name: str) -> Float[Tensor, "B"]:
        return self.values[self.names.index(name)]

    def ranked(self, row: int = 0) -> list[tuple[str, float]]:
        """Return names and values of one sequence, sorted by absolute value, largest first."""
        pairs = zip(self.names, self.values[:, row].tolist(), strict=True)
        return sorted(pairs, key=lambda pair: -abs(pair[1]))

    def heads(self, kind: str = "attention") -> Float[Tensor, "L H B"]:
        """Return the values of all heads (of `attention` or `cross`) by layer."""
        found = [(name, i) for i, name in enumerate(self.names) if f".{kind}.head." in name]
        if not found:
            raise LensError(
                f"there is no head of {kind!r} in this attribution: use attention, or cross if the model has it."
            )
        layers = len({name.partition(f".{kind}.")[0] for name, _ in found})
        return self.values[[i for _, i in found]].unflatten(0, (layers, -1))


@torch.no_grad()
def attribute_logits(
    model: Model,
    tokens: Tokens,
    answer: int | Int[Tensor, "B"],
    wrong: int | Int[Tensor, "B"] | None = None,
    *,
    position: int | Int[Tensor, "B"] = -1,
    **given: Unpack[ForwardArguments],
) -> Attribution:
    """Direct logit attribution: the logit of `answer` at `position` (minus that of `wrong`) as a sum of contributions.

    logit = scale W[answer] . final + bias[answer], with `final` decomposed and the final norm's statistics frozen
    (Elhage et al. 2021; Wang et al. 2022). An output head with a transform (BERT's) is not linear: contributions are to
    the residual stream before the transform, with the activation a(u) = (a(u)/u) u frozen at its gate a(u)/u and the
    head's norm frozen too, which keeps the sum exact; `note` states this.
    """
    head, config = model.head, model.config
    if head is None:
        raise LensError(
            "this model has no head (config.head is None), so there is no logit to attribute: use decompose."
        )
    at = decompose(model, tokens, f"{output_stack(config)}final", position=position, **given)
    names, parts, rows = list(at.names), at.parts, at.total.shape[0]
    answers, others = one_per_row(model, answer, rows), None if wrong is None else one_per_row(model, wrong, rows)
    table = model.embed.tokens.weight if head.weight is None else head.weight
    direction = table[answers] if others is None else table[answers] - table[others]  # (B, D)
    note = _NOTES[config.placement]
    if head.transform is not None:
        names, parts = _through_transform(head, names, parts, at.total)
        note += _TRANSFORM_NOTE
    values = torch.einsum("cbtd,bd->cb", parts, head.scale * direction)
    if head.bias is not None:
        names.append("head.bias")
        bias = head.bias[answers] if others is None else head.bias[answers] - head.bias[others]
        values = torch.cat([values, bias[None]])
    logits = model.logits(at.total)[:, 0]
    logit = logit_difference(logits, answers, others)
    return Attribution(tuple(names), values, logit, _sums("attribution-sums-to-logit", values, logit), note)


_NOTES = {
    "pre": "The final norm's scale is frozen at its value in this run.",
    "parallel": "The final norm's scale is frozen at its value in this run.",
    "post": "Every norm's scale is frozen at its value in this run.",
}
_TRANSFORM_NOTE = (
    " The head's transform is not linear: contributions are to the residual stream before it, with the gates of its "
    "activation and its norm's scale frozen at their values in this run."
)


def _through_transform(head: Head, names: list[str], parts: Tensor, x: Tensor) -> tuple[list[str], Tensor]:
    """Pass contributions through norm(activation(transform(x))) with gates and scale frozen at x."""
    assert head.transform is not None
    assert head.activation is not None
    assert head.norm is not None
    before = head.transform(x)  # (B, 1, D)
    after = head.activation(before)
    gate = torch.where(before == 0, torch.zeros_like(before), after / before)  # every activation is 0 at 0
    norm = FrozenNorm.at(head.norm, after)
    parts = torch.cat([parts @ head.transform.weight.T, head.transform.bias.expand_as(x)[None]])
    parts, names = norm.linear(gate * parts), [*names, "head.transform.bias"]
    if norm.bias is not None:
        parts, names = torch.cat([parts, norm.bias.expand_as(x)[None]]), [*names, "head.norm.bias"]
    return names, parts


def one_per_row(model: Model, token: int | Int[Tensor, "N"], rows: int) -> Int[Tensor, "B"]:
    """Return one checked token id per row, from one for all rows or one for each."""
    tokens = torch.as_tensor(token, device=model.device).flatten()
    if tokens.numel() not in (1, rows):
        raise LensError(f"{tokens.numel()} answers were given for {rows} rows: give one token id, or one per row.")
    size = model.config.vocab_size
    if int(tokens.min()) < 0 or int(tokens.max()) >= size:
        raise LensError(f"token id {token} is outside the vocabulary of {size}: use 0 to {size - 1}.")
    return tokens.expand(rows)


def logit_difference(
    logits: Float[Tensor, "B V"], answers: Int[Tensor, "B"], others: Int[Tensor, "B"] | None
) -> Float[Tensor, "B"]:
    """Return the logit of each row's answer, minus that of the other token if there is one."""
    picked = logits.gather(1, answers[:, None])[:, 0]
    return picked if others is None else picked - logits.gather(1, others[:, None])[:, 0]


@dataclass(frozen=True)
class StreamNorms:
    """Norms by depth: of the residual stream before the first block and after each, and of each sublayer's output."""

    stream: Float[Tensor, "L1 B T"]
    branches: dict[str, Float[Tensor, "L B T"]] = field(default_factory=dict)
    """`attention.out`, `cross.out` and `feedforward.out`, if they exist."""


def stream_norms(model: Model, tokens: Tokens, **given: Unpack[ForwardArguments]) -> StreamNorms:
    """Return the Euclidean norms of the residual stream and of each sublayer's output at every depth and position.

    For an encoder-decoder they are those of the decoder.
    """
    prefix = output_stack(model.config)
    known = sites_of(model)
    kinds = [kind for kind in ("attention.out", "cross.out", "feedforward.out") if f"{prefix}blocks.0.{kind}" in known]
    streams = [f"{prefix}blocks.0.resid_pre", f"{prefix}blocks.*.resid_post"]
    run = trace(model, tokens, sites=[*streams, *(f"{prefix}blocks.*.{kind}" for kind in kinds)], **given)
    stream = torch.cat([run.stack(streams[0]), run.stack(streams[1])]).norm(dim=-1)
    return StreamNorms(stream, {kind: run.stack(f"{prefix}blocks.*.{kind}").norm(dim=-1) for kind in kinds})
