"""Record a forward pass: `trace` runs a model with a tap that records named sites and applies edits to them.

    trace(model, tokens, sites=["blocks.*.attention.pattern"])["blocks.3.attention.pattern"]   # (B,H,T,S)

`model.context.Tap` describes the sites. If `scores` or `pattern` of a layer are requested, that layer uses explicit
attention; otherwise it uses the fused kernel. The two agree up to rounding, so for bitwise equality compare runs that
request the same scores and patterns.

A trace runs in evaluation mode (no dropout) and leaves the model in the mode it was in.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from glassformer import config as c
from glassformer.errors import plural
from glassformer.lens.sites import LensError, MissingSite, Site, Sites, select, site_name, sites_of
from glassformer.model import NO_TAP, Cache, DecoderLM, EncoderLM, Model, Seq2Seq, Tap
from glassformer.shapes import Bool, Float, Int, Shaped

Tokens = Tensor | Sequence[int] | Sequence[Sequence[int]] | str
Edit = Callable[[str, Tensor], Tensor]
"""A function of a site's name and value that returns the value the model continues with. See `lens.patch`."""


class ForwardArguments(TypedDict, total=False):
    """The arguments of a forward pass other than the tokens."""

    target: Tokens
    """The decoder's tokens (B,T) of an encoder-decoder, whose `tokens` are the source."""
    mask: Bool[Tensor, "B T"] | Bool[Tensor, "B T S"] | None
    source_mask: Bool[Tensor, "B S"] | None
    positions: Int[Tensor, "#B T"] | None
    segments: Int[Tensor, "#B T"] | None
    cache: Cache | None
    tokenizer: Any
    """Needed for tokens given as text: anything whose `encode(text)` gives ids, or an object with `.ids`."""


class Trace(Mapping[str, Tensor]):
    """Recorded tensors by site name. `sites` lists them with their shapes; `logits` is the model's output."""

    def __init__(
        self,
        config: c.ModelConfig,
        values: dict[str, Tensor],
        logits: Float[Tensor, "B T V"] | None,
        tokens: Int[Tensor, "B N"],
        target: Int[Tensor, "B T"] | None = None,
    ):
        self.config, self._values, self._logits = config, values, logits
        self.tokens, self.target = tokens, target
        """The input tokens; for an encoder-decoder the source and the target."""

    def __getitem__(self, name: str) -> Tensor:
        site = name if name in self._values else site_name(self.config, name)
        if site not in self._values:
            raise MissingSite(f"{name} was not recorded in this run: trace again with sites=[{name!r}].")
        return self._values[site]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def sites(self) -> Sites:
        known = sites_of(self.config)
        return Sites(Site(name, known[name].letters, tuple(value.shape)) for name, value in self._values.items())

    @property
    def logits(self) -> Float[Tensor, "B T V"]:
        if self._logits is None:
            raise LensError("this model has no head (config.head is None) and so no logits: read the site final.")
        return self._logits

    def stack(self, pattern: str) -> Shaped[Tensor, "L ..."]:
        """Stack the recorded sites that match along a new first axis L: `stack("blocks.*.attention.pattern")`."""
        names = [name for name in select(self.config, pattern) if name in self._values]
        if not names:
            raise MissingSite(f"{pattern} was not recorded in this run: trace again with sites=[{pattern!r}].")
        return torch.stack([self._values[name] for name in names])

    def to(self, device: str | torch.device) -> "Trace":
        """Return the same trace with its tensors on another device."""
        values = {name: value.to(device) for name, value in self._values.items()}
        logits = None if self._logits is None else self._logits.to(device)
        target = None if self.target is None else self.target.to(device)
        return Trace(self.config, values, logits, self.tokens.to(device), target)

    def n_bytes(self) -> int:
        """Return the bytes of the recorded tensors; shared storage (resid_post and the next resid_pre) counts once."""
        held = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in self._values.values()}
        return sum(held.values())

    def _repr_html_(self) -> str:
        """Return the display in a notebook: attention maps, and the recorded tensors with their shapes."""
        from glassformer.lens.display import display

        return display(self)

    def __repr__(self) -> str:
        return f"Trace of {plural(len(self), 'site')} over tokens {tuple(self.tokens.shape)}"


class Recorder:
    """The tap of a trace: applies the edit of a site, then records the site if it is selected."""

    def __init__(
        self,
        selected: Iterable[str],
        edits: Mapping[str, Edit] | None = None,
        grad: bool = False,
        overwritten: bool = False,
    ):
        self.selected, self.edits, self.grad = frozenset(selected), edits or {}, grad
        self.overwritten = overwritten
        """True if keys and values are stored in a buffer that later steps overwrite: they are then copied."""
        self.values: dict[str, Tensor] = {}

    def __call__(self, site: str, value: Tensor) -> Tensor:
        if site in self.edits:
            value = self._edited(site, value)
        if site in self.selected:
            kept = value if self.grad else value.detach()
            self.values[site] = kept.clone() if self.overwritten and site.endswith((".k", ".v")) else kept
        return value

    def _edited(self, site: str, value: Tensor) -> Tensor:
        new = self.edits[site](site, value)
        if new.shape != value.shape:
            raise LensError(
                f"an edit of {site} returned the shape {tuple(new.shape)} instead of {tuple(value.shape)}: "
                "it must keep the shape."
            )
        return new.to(value)

    def wants(self, site: str) -> bool:
        return site in self.selected or site in self.edits


def trace(
    model: Model,
    tokens: Tokens,
    *,
    sites: str | Iterable[str] | None = None,
    edits: Mapping[str, Edit] | None = None,
    grad: bool = False,
    **given: Unpack[ForwardArguments],
) -> Trace:
    """Run the model and record `sites` (names or patterns; None records all), after applying `edits` to them.

    `tokens` are (B,T), (T,), lists of ids, or text with `tokenizer=`. For an encoder-decoder they are the source, and
    `target=` are the decoder's tokens. Tensors are detached unless `grad`, which keeps the graph to the parameters.

    >>> import torch
    >>> trace = gf.trace(gf.load("bard"), torch.tensor([[1, 2, 3]]), sites=["blocks.0.attention.pattern"])
    >>> trace["blocks.0.attention.pattern"].shape
    torch.Size([1, 5, 3, 3])
    """
    names = select(model.config, sites)
    changes = {name: edit for pattern, edit in (edits or {}).items() for name in select(model.config, pattern)}
    cache = given.get("cache")
    recorder = Recorder(names, changes, grad, overwritten=cache is not None and cache.capacity is not None)
    tap: Tap = recorder if names or changes else NO_TAP
    ids = read_tokens(model, tokens, given.get("tokenizer"))
    if given.get("target") is not None:
        given["target"] = read_tokens(model, given["target"], given.get("tokenizer"))
    with torch.set_grad_enabled(grad), evaluating(model):
        hidden = run_hidden(model, ids, tap, **given)
        logits = None if model.head is None else model.logits(hidden, tap)
    target = given.get("target")
    return Trace(model.config, recorder.values, logits, ids, target if isinstance(target, Tensor) else None)


def run_hidden(
    model: Model, tokens: Tokens, tap: Tap = NO_TAP, **given: Unpack[ForwardArguments]
) -> Float[Tensor, "B T D"]:
    """Return the input of the output head. Arguments that this kind of model does not accept raise LensError."""
    tokenizer = given.get("tokenizer")
    ids = read_tokens(model, tokens, tokenizer)
    mask, positions, segments = given.get("mask"), given.get("positions"), given.get("segments")
    cache, target, source_mask = given.get("cache"), given.get("target"), given.get("source_mask")
    if isinstance(model, Seq2Seq):
        _refuse("an encoder-decoder", positions=positions, segments=segments)
        if target is None:
            raise LensError("an encoder-decoder needs the decoder's tokens as well as the source: give target=.")
        wanted = read_tokens(model, target, tokenizer)
        _check_length(model, ids.shape[1], "the source")
        _check_length(model, wanted.shape[1] + (len(cache) if cache is not None else 0), "the target")
        memory = None if cache is not None and len(cache) else model.encode(ids, source_mask, tap=tap)
        return model.decode_hidden(wanted, memory, source_mask, mask, cache=cache, tap=tap)
    _refuse("a model with one stack", target=target, source_mask=source_mask)
    if positions is None:  # explicit positions may exceed the context if the position scheme allows it
        _check_length(model, ids.shape[1] + (len(cache) if cache is not None else 0), "the text")
    if isinstance(model, EncoderLM):
        _refuse("an encoder", cache=cache)
        return model.encode(ids, mask, positions, segments, tap)
    assert isinstance(model, DecoderLM)
    return model.encode(ids, mask, positions, segments, cache, tap)


def read_tokens(model: Model, tokens: Tokens, tokenizer: Any = None) -> Int[Tensor, "B T"]:
    """Return token ids as (B,T) on the model's device, from a tensor, lists, or text with its tokenizer."""
    if isinstance(tokens, str):
        if tokenizer is None:
            raise LensError("text was given without a tokenizer: give tokenizer= or token ids.")
        encoded = tokenizer.encode(tokens)
        tokens = torch.as_tensor(getattr(encoded, "ids", encoded))
    try:
        ids = torch.as_tensor(tokens, device=model.device)
    except (ValueError, TypeError):
        raise LensError(
            "tokens must be ids (T,) or (B,T) with rows of one length: pad shorter rows and give mask=."
        ) from None
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.dim() != 2 or ids.numel() == 0 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise LensError(
            f"tokens have shape {tuple(ids.shape)} and dtype {ids.dtype}: give integers (T,) or (B,T), at least one."
        )
    return ids.long()


def _refuse(kind: str, **unused: Any) -> None:
    for name, value in unused.items():
        if value is not None:
            raise LensError(f"{name}= was given, which {kind} does not accept: leave it out.")


def _check_length(model: Model, length: int, what: str) -> None:
    limit = model.config.max_len
    if limit is not None and length > limit:
        raise LensError(f"{what} has {length} tokens, more than the context of {limit}: shorten it to {limit} or less.")


@contextmanager
def evaluating(model: Model) -> Iterator[None]:
    """Put the model in evaluation mode and restore every module's mode afterwards."""
    training = [module for module in model.modules() if module.training]
    if training:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def require_equal_length(
    clean: int, corrupt: int, names: tuple[str, str] = ("the clean text", "the corrupt text")
) -> None:
    """Raise LensError if two texts differ in their number of tokens; `names` are used in the message."""
    if clean != corrupt:
        raise LensError(
            f"{names[0]} has {plural(clean, 'token')} and {names[1]} has {plural(corrupt, 'token')}: patching "
            "replaces the value at each position by the value at the same position of the other text, so both need the "
            "same number of tokens. Shorten or lengthen one of them."
        )
