"""Any model seen through one window: tokens in, logits out, and what else it can do.

    subject = subject_of(model)                    # ours, Hugging Face's, nanoGPT-like, plain modules, callables
    with subject.isolated(warm=6.0) as isolated:     # a copy, so that nothing a probe does stays
        logits = isolated.logits(tokens, mask=mask)

`subject_of` is in adapt.py. An unusual model gets an adapter: any object with a call like
`(tokens, mask=None, positions=None, cache=None)`, spelled with the names of `interface.py`, and `config.vocab_size`.
docs/doctor.md has an example of ten lines.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from glassformer.config.choices import ModelKind
from glassformer.doctor.subject import interface as calls
from glassformer.doctor.subject.arguments import InferenceParams, InternalCache, sizes_for
from glassformer.doctor.subject.copies import Copies, SharedCopy, answered, n_bytes_of
from glassformer.doctor.subject.declared import SPECIAL_ID, Declared
from glassformer.doctor.subject.errors import Unsupported
from glassformer.doctor.subject.interface import Interface
from glassformer.doctor.subject.isolate import NoDropout
from glassformer.doctor.subject.snapshot import seed_torch
from glassformer.shapes import Float, Int, Shaped

Kind = ModelKind
LENGTHS = (5, 24, 65, 129)
"""Short, usual, and one past two powers of two: "only after position n" bugs like powers of two."""
LARGE = 30_000_000
"""Parameters above which the longest probes are shortened."""


@dataclass
class Subject:
    """A model, how it is called, and what it says about itself."""

    model: Any
    kind: Kind
    vocab_size: int
    interface: Interface
    facts: Declared
    name: str = "model"
    expect: Mapping[str, Any] = field(default_factory=dict)
    limit: int = 129
    """Longest input that works, as far as the probes go."""
    multiple: int = 1
    """Inputs must be as long as a multiple of this; where it is `limit`, there is one length only."""
    notes: list[str] = field(default_factory=list)
    warmth: float = 1.0
    """Factor for the second look: 6 where attention is almost uniform, 1 where it is already sharp."""
    vocabulary_logits: bool = True
    """Whether the last axis is the vocabulary; False for an encoder without a head."""
    brief: bool = False
    """Examined as a large model is: fewer and shorter inputs, each measurement made once."""
    mute: bool = False
    """Dropout replaced by identity, because the model drops in eval mode."""
    seeded: bool = False
    """The random state is set before each call, because the model draws unless its config gives a seed."""
    in_place: bool = False
    """A deep copy would not compute with its own weights: the model itself is examined, then restored."""
    look: tuple[Any, ...] = ()
    """Of an isolated subject: warmth, precision, mode."""
    noise: dict[Any, float] = field(default_factory=dict)
    """Prefix noise over the logits' size by look, kept for a large model: see `compare.prefix_noise`."""

    place: torch.device | None = None
    """Device of the inputs of a model without parameters, such as a callable. Default: the CPU."""
    continuous: int | None = None
    """Longest input of which a top-k selection keeps every key; None where none is selected (see selection.py)."""

    copies: Copies = field(default_factory=Copies, repr=False)
    """Copies of the model that probes share."""
    shared: SharedCopy | None = field(default=None, repr=False)
    """Of an isolated subject: what is shared of its copy."""
    repeats: bool = False
    """The same call gives the same answer, whatever was called before: an answer may be used again."""

    def between_lengths(self) -> "Subject":
        """This subject, limited to inputs of which results may be compared between lengths."""
        return self if self.continuous is None else replace(self, limit=min(self.limit, self.continuous))

    @property
    def module(self) -> nn.Module | None:
        return self.model if isinstance(self.model, nn.Module) else None

    @property
    def n_parameters(self) -> int:
        return sum(p.numel() for p in self.module.parameters()) if self.module is not None else 0

    @property
    def large(self) -> bool:
        """Whether the longest probes are shortened and each is made once, with warm weights."""
        return self.brief or self.n_parameters > LARGE

    @property
    def device(self) -> torch.device:
        first = next(self.module.parameters(), None) if self.module is not None else None
        if first is not None:
            return first.device
        return self.place or torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        if self.module is not None:
            for parameter in self.module.parameters():
                if parameter.is_floating_point():
                    return parameter.dtype
        return torch.float32

    def lengths(self) -> list[int]:
        """Lengths to probe, within what the model takes."""
        if self.large:
            return sorted({self.length(24), self.length(65)})
        longest = min(self.limit, LENGTHS[-1])
        return sorted({self.length(t) for t in (*(t for t in LENGTHS if t <= longest), longest)})

    def length(self, wanted: int, if_large: int | None = None) -> int:
        """A length within what the model takes; a large model may get a shorter one, its width makes up for it."""
        wanted = min(if_large if if_large is not None and self.large else wanted, self.limit)
        return min(-(-wanted // self.multiple) * self.multiple, self.limit)

    def takes(self, length: int) -> bool:
        """Whether inputs of this length can be given."""
        return 0 < length <= self.limit and length % self.multiple == 0

    def rows(self, usual: int, if_large: int = 1) -> int:
        return if_large if self.large else usual

    @contextlib.contextmanager
    def isolated(
        self, warm: float = 1.0, dtype: torch.dtype | None = None, train: bool = False, own: bool = False
    ) -> Iterator["Subject"]:
        """This subject with a copy of its model, in eval mode; see `isolate.borrowed`.

        Probes share copies. One that writes to the weights asks for a copy of its `own`.
        """
        dropping: Any = NoDropout() if self.mute else contextlib.nullcontext()
        borrowing = self.copies.borrow(self.model, warm, dtype, train, self.in_place, own)
        with borrowing as (model, shared), torch.no_grad(), dropping:
            yield replace(self, model=model, look=(warm, dtype, train), copies=Copies(), shared=shared)

    def answer(
        self, what: Any, given: dict[str, Any], compute: Callable[[], Any], size: Callable[[Any], int] = n_bytes_of
    ) -> Any:
        """What `compute` returns for this input, computed once where a call repeats itself; see copies.py."""
        return answered(self.shared if self.repeats else None, what, given, compute, size)

    def tokens(self, rows: int, length: int, seed: int = 0) -> Int[Tensor, "B T"]:
        """Random ids, none of them special: a padding id in the text would be a different question."""
        generator = torch.Generator().manual_seed(seed)
        usable = torch.ones(min(self.vocab_size, 50_000), dtype=torch.bool)
        usable[[i for i in self.special_ids() if i < len(usable)]] = False
        ids = usable.nonzero().flatten() if bool(usable.any()) else torch.zeros(1, dtype=torch.long)
        picked = torch.randint(0, len(ids), (rows, length), generator=generator)
        return ids[picked].to(self.device)

    def special_ids(self) -> set[int]:
        """Ids that the config gives a meaning of their own: one number or a list of them under each name."""
        found = set() if self.pad is None else {self.pad}
        for name, value in self.facts.raw.items():
            if SPECIAL_ID.search(name):
                values = value if isinstance(value, list | tuple | set) else [value]
                found |= {v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0}
        return found

    def other(self, tokens: Int[Tensor, "B T"], seed: int = 1) -> Int[Tensor, "B T"]:
        """Ids of the same shape, different at every position."""
        fresh = self.tokens(len(tokens), tokens.shape[1], seed + 1000)
        clash = fresh == tokens
        third = self.tokens(len(tokens), tokens.shape[1], seed + 2000)
        fresh = torch.where(clash, third, fresh)
        return torch.where(fresh == tokens, (tokens + 1) % self.vocab_size, fresh)

    @property
    def pad(self) -> int | None:
        pad = self.facts.whole("pad") if self.facts.pad != 0 else 0
        return pad if pad is not None and pad < self.vocab_size else None

    def source(self, rows: int, length: int = 11, seed: int = 77) -> Int[Tensor, "B S"]:
        return self.tokens(rows, length, seed)

    def logits(self, tokens: Int[Tensor, "B T"], **given: Any) -> Float[Tensor, "B T V"]:
        """Logits at every position. `mask` and `source_mask`: True = real. `source` belongs to an encoder-decoder."""
        return self.answer("logits", {"tokens": tokens, **given}, lambda: self.call(tokens, **given)[0])

    def call(
        self, tokens: Int[Tensor, "B T"], cache: Any = None, with_cache: bool = False, **given: Any
    ) -> tuple[Float[Tensor, "B T V"], Any]:
        """One call of the model; returns logits and the cache it gave back (or the one it was given). See `output`."""
        if with_cache and cache is None and self.interface.internal:
            cache = InternalCache()
        output = self.output(tokens, cache=cache, with_cache=with_cache, **given)
        logits = self.logits_in(output, tokens)
        if isinstance(cache, InternalCache):
            return logits, InternalCache(cache.length + tokens.shape[1])
        if isinstance(cache, InferenceParams):
            cache.seqlen_offset += tokens.shape[1]
        returned = calls.find_cache(output) if with_cache or cache is not None else None
        return logits, cache if returned is None else returned

    def logits_in(self, output: Any, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T V"]:
        """The logits in what a call of the model returned for these tokens."""
        shape = (tokens.shape[0], tokens.shape[1])
        if self.interface.time_first:
            return calls.find_logits(output, shape[::-1], self.vocab_size).transpose(0, 1)
        return calls.find_logits(output, shape, self.vocab_size)

    def output(
        self,
        tokens: Int[Tensor, "B T"],
        mask: Shaped[Tensor, "B S"] | None = None,
        positions: Int[Tensor, "B T"] | None = None,
        cache: Any = None,
        source: Int[Tensor, "B N"] | None = None,
        source_mask: Shaped[Tensor, "B N"] | None = None,
        with_cache: bool = False,
        **more: Any,
    ) -> Any:
        """What one call of the model returns, as it is."""
        face = self.interface
        arguments: dict[str, Any] = {**face.flags, **more}
        if mask is not None:
            self._put(arguments, face.mask, self._mask(mask), "a mask")
        if positions is not None:
            self._put(arguments, face.positions, positions, "positions")
        if source_mask is not None:
            self._put(arguments, face.source_mask, self._mask(source_mask), "a source mask")
        internal = isinstance(cache, InternalCache)
        if cache is not None and not internal:
            self._put(arguments, face.cache, cache, "a cache")
        self._start(len(tokens), cache)
        if face.use_cache is not None:
            arguments[face.use_cache] = with_cache or cache is not None
        if face.needs_labels and face.labels and face.labels not in arguments:
            arguments[face.labels] = tokens.clone()
        positional: list[Tensor] = [tokens.t().clone() if face.time_first else tokens.clone()]
        if face.is_seq2seq:
            source = self.source(len(tokens)) if source is None else source
            positional = [source.clone()]
            arguments[cast(str, face.target)] = tokens.clone()
        arguments = {**self.filled(tokens, source, cache.length if internal else 0), **arguments}
        if internal:
            arguments |= {name: filler(tokens, cache.length) for name, filler in face.address.items()}
        if self.seeded:
            seed_torch()
        return self.model(*positional, **arguments)

    def _start(self, rows: int, cache: Any) -> None:
        """Make or empty the caches that the model keeps itself, before the first tokens of a sequence."""
        face = self.interface
        if face.setup is not None and (cache is None or cache.length == 0):
            face.setup(self.model, rows)
        if face.begin is not None and not isinstance(cache, InternalCache):
            face.begin.undo(self.model)
        elif face.begin is not None and cache.length == 0:
            face.begin(self.model, rows)

    def filled(self, tokens: Tensor, source: Tensor | None = None, start: int = 0) -> dict[str, Any]:
        """Values of the required arguments for a call with these tokens."""
        found = {}
        for name, filler in self.interface.fill.items():
            of_source = name == self.interface.source_mask or name.startswith(("src", "source", "enc"))
            found[name] = filler(source, 0) if of_source and source is not None else filler(tokens, start)
        return found

    def _put(self, arguments: dict[str, Any], name: str | None, value: Any, what: str) -> None:
        if name is None:
            raise Unsupported(f"the model takes no argument for {what}")
        arguments[name] = value

    def _mask(self, mask: Tensor) -> Tensor:
        mask = mask.bool()
        return (~mask if self.interface.mask_inverted else mask).to(self.interface.mask_dtype)

    @property
    def has_cache(self) -> bool:
        return self.interface.cache is not None or self.interface.internal

    def new_cache(self, rows: int = 1) -> Any:
        """An empty cache for a number of rows; None where the model makes its own when asked to use one."""
        if not self.has_cache:
            raise Unsupported("the model takes no cache")
        if self.interface.internal:
            return InternalCache()
        if self.interface.empty is not None:
            return self.interface.empty()
        maker = self.interface.maker
        if maker is None:
            return None
        method = getattr(self.model, maker)
        return method(**sizes_for(method, rows, self.facts.whole("max_len") or 256, self.dtype))

    def blocks(self) -> dict[str, nn.Module]:
        """The layers by name: the longest list of modules of one class, and each other list as long as a stack."""
        if self.module is None:
            return {}
        lists: list[tuple[str, nn.ModuleList | nn.Sequential]] = []
        for name, module in self.module.named_modules():
            if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) and _uniform(module):
                lists.append((name, module))
        outer = [(n, m) for n, m in lists if not any(n.startswith(o + ".") for o, _ in lists if o != n)]
        return {f"{name}.{i}" if name else str(i): block for name, inner in outer for i, block in enumerate(inner)}


def _uniform(modules: nn.ModuleList | nn.Sequential) -> bool:
    """Layers: modules with parts of their own, of one class or with parts of the same names."""
    first = {name for name, _ in modules[0].named_children()}
    if not first or not any(True for _ in modules.parameters()):
        return False
    same = [type(m) is type(modules[0]) or first & {n for n, _ in m.named_children()} for m in modules]
    return all(same) and not isinstance(modules[0], nn.ModuleList | nn.Sequential)


def layer_of(path: str, blocks: Mapping[str, nn.Module]) -> tuple[str, int] | None:
    """Which stack and which layer a module's path lies in."""
    for name in blocks:
        if path == name or path.startswith(name + "."):
            stack, _, number = name.rpartition(".")
            return stack, int(number)
    return None
