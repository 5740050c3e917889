"""The three models, and `build`, which makes one and fills it from the table of initial distributions.

A model computes logits, nothing else: loss, sampling and optimizers live elsewhere.
"""

import fnmatch
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from glassformer import config as c
from glassformer.config import presets
from glassformer.model.block import Stack
from glassformer.model.cache import Cache, CacheKind, build_cache
from glassformer.model.context import NO_TAP, Mask, Tap, check_inputs, scoped
from glassformer.model.layers import Embed, Head
from glassformer.shapes import Bool, Float, Int


class _Model(nn.Module):
    """What the three models share: a config, an embedding, a head."""

    def __init__(self, cfg: c.ModelConfig):
        super().__init__()
        self.config = cfg
        self.embed = Embed(cfg)

    def logits(self, hidden: Float[Tensor, "B T D"], tap: Tap = NO_TAP) -> Float[Tensor, "B T V"]:
        """The head alone, on the output of `encode` (for an encoder-decoder: of `decode_hidden`)."""
        head: Any = self.head
        if head is None:
            raise ValueError("this model has no head (config.head is None): use encode() for its hidden states.")
        return tap("logits", head(hidden, self.embed.tokens.weight))

    @property
    def device(self) -> torch.device:
        return self.embed.tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the weights are stored: that of the embedding."""
        return self.embed.tokens.weight.dtype


class DecoderLM(_Model):
    """Decoder-only: logits (B,T,V) of the next token at every position, from that position and earlier ones."""

    def __init__(self, cfg: c.DecoderConfig):
        super().__init__(cfg)
        self.decoder = Stack(cfg, cfg.n_layers, causal=True)
        self.head = Head(cfg, cfg.head) if cfg.head else None

    @property
    def blocks(self) -> nn.ModuleList:
        return self.decoder.layers

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        mask: Mask = None,
        positions: Int[Tensor, "#B T"] | None = None,
        segments: Int[Tensor, "#B T"] | None = None,
        cache: Cache | None = None,
        tap: Tap = NO_TAP,
    ) -> Float[Tensor, "B T V"]:
        """`mask` is (B,T), True at real tokens, or (B,T,S), the pattern (or (B,L,T,S), that of each layer).

        With a cache, pass only the new tokens.
        """
        return self.logits(self.encode(tokens, mask, positions, segments, cache, tap), tap)

    def encode(
        self,
        tokens: Int[Tensor, "B T"],
        mask: Mask = None,
        positions: Int[Tensor, "#B T"] | None = None,
        segments: Int[Tensor, "#B T"] | None = None,
        cache: Cache | None = None,
        tap: Tap = NO_TAP,
    ) -> Float[Tensor, "B T D"]:
        """Hidden states (B,T,D) after the final norm: the input of the head."""
        check_inputs(self.embed, self.decoder, tokens, mask, positions, segments, cache)
        return self.decoder(self.embed(tokens, segments), mask, positions, cache, tap)

    def new_cache(
        self, kind: CacheKind = "growing", capacity: int | None = None, slack: int = 0, fixed: bool = False
    ) -> Cache:
        """An empty cache: `growing`, `static` (needs capacity) or `windowed` (crop can go back `slack` tokens)."""
        return build_cache(self.decoder.windows, kind, self.device, capacity, slack, fixed)


class EncoderLM(_Model):
    """Encoder-only: no causal mask. Logits (B,T,V) are of the token at each position itself (masked LM)."""

    def __init__(self, cfg: c.EncoderConfig):
        super().__init__(cfg)
        self.encoder = Stack(cfg, cfg.n_layers, causal=False)
        self.head = Head(cfg, cfg.head) if cfg.head else None
        self.pooler = nn.Linear(cfg.d_model, cfg.d_model) if cfg.pooler else None

    @property
    def blocks(self) -> nn.ModuleList:
        return self.encoder.layers

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        mask: Mask = None,
        positions: Int[Tensor, "#B T"] | None = None,
        segments: Int[Tensor, "#B T"] | None = None,
        tap: Tap = NO_TAP,
    ) -> Float[Tensor, "B T V"]:
        return self.logits(self.encode(tokens, mask, positions, segments, tap), tap)

    def encode(
        self,
        tokens: Int[Tensor, "B T"],
        mask: Mask = None,
        positions: Int[Tensor, "#B T"] | None = None,
        segments: Int[Tensor, "#B T"] | None = None,
        tap: Tap = NO_TAP,
    ) -> Float[Tensor, "B T D"]:
        check_inputs(self.embed, self.encoder, tokens, mask, positions, segments)
        return self.encoder(self.embed(tokens, segments), mask, positions, None, tap)

    def pool(self, hidden: Float[Tensor, "B T D"]) -> Float[Tensor, "B D"]:
        """tanh(W h_0 + b): BERT's sentence vector, computed from the first token."""
        if self.pooler is None:
            raise ValueError("this model has no pooler: build it with pooler=True.")
        return torch.tanh(self.pooler(hidden[:, 0]))


class Seq2Seq(_Model):
    """Encoder-decoder: the decoder attends to the encoder's output by cross-attention."""

    def __init__(self, cfg: c.Seq2SeqConfig):
        super().__init__(cfg)
        self.encoder = Stack(cfg, cfg.n_encoder_layers, causal=False)
        self.decoder = Stack(cfg, cfg.n_layers, causal=True, cross=True)
        self.head = Head(cfg, cfg.head) if cfg.head else None

    @property
    def blocks(self) -> nn.ModuleList:
        return self.decoder.layers

    def forward(
        self,
        source: Int[Tensor, "B N"],
        target: Int[Tensor, "B T"],
        source_mask: Bool[Tensor, "B N"] | None = None,
        mask: Mask = None,
        cache: Cache | None = None,
        tap: Tap = NO_TAP,
    ) -> Float[Tensor, "B T V"]:
        """Logits of the token after each target token. With a cache, the source is encoded at the first call only."""
        memory = None if cache is not None and cache.length else self.encode(source, source_mask, tap=tap)
        return self.decode(target, memory, source_mask, mask, cache=cache, tap=tap)

    def encode(
        self,
        source: Int[Tensor, "B N"],
        mask: Mask = None,
        positions: Int[Tensor, "#B N"] | None = None,
        tap: Tap = NO_TAP,
    ) -> Float[Tensor, "B N D"]:
        check_inputs(self.embed, self.encoder, source, mask, positions)
        return self.encoder(self.embed(source), mask, positions, None, scoped(tap, "encoder."))

    def decode(
        self,
        target: Int[Tensor, "B T"],
        memory: Float[Tensor, "B N D"] | None,
        memory_mask: Bool[Tensor, "B N"] | None = None,
        mask: Mask = None,
        positions: Int[Tensor, "#B T"] | None = None,
        cache: Cache | None = None,
        tap: Tap = NO_TAP,
    ) -> Float[Tensor, "B T V"]:
        """The decoder alone. `memory` is the output of `encode`; None if its keys and values are in the cache."""
        return self.logits(self.decode_hidden(target, memory, memory_mask, mask, positions, cache, tap), tap)

    def decode_hidden(
        self,
        target: Int[Tensor, "B T"],
        memory: Float[Tensor, "B N D"] | None,
        memory_mask: Bool[Tensor, "B N"] | None = None,
        mask: Mask = None,
        positions: Int[Tensor, "#B T"] | None = None,
        cache: Cache | None = None,
        tap: Tap = NO_TAP,
    ) -> Float[Tensor, "B T D"]:
        """Hidden states (B,T,D) after the final norm: the input of the head."""
        check_inputs(self.embed, self.decoder, target, mask, positions, None, cache)
        if memory is None and (cache is None or cache.length == 0):
            raise ValueError("the decoder has no encoder output: pass `memory`, or a cache that holds its keys.")
        if memory_mask is not None and memory_mask.device.type == "cpu" and not bool(memory_mask.any(1).all()):
            raise ValueError("a source sequence is all padding, so cross-attention has no keys: drop that sequence.")
        x = self.embed(target)
        return self.decoder(x, mask, positions, cache, scoped(tap, "decoder."), memory, memory_mask)

    def new_cache(
        self, kind: CacheKind = "growing", capacity: int | None = None, slack: int = 0, fixed: bool = False
    ) -> Cache:
        """An empty cache of the decoder; the encoder's keys and values join it at the first step."""
        windows = self.decoder.windows
        return build_cache(windows, kind, self.device, capacity, slack, fixed, n_cross=len(windows))


Model = DecoderLM | EncoderLM | Seq2Seq


# Pattern of the parameter's name -> distribution. First match wins; a name that matches none is an error.
#   normal: N(0, init_std^2);  residual: N(0, (init_std / sqrt(number of residual branches))^2), so that the stream's
#   variance does not grow with depth (Radford et al. 2019, 2.3);  one, zero: constants. The weight of a norm with an
#   offset starts at one minus the offset.
TABLE: tuple[tuple[str, str], ...] = (
    ("*norm*.weight", "one"),
    ("*.bias", "zero"),
    ("*.sinks", "zero"),
    ("*.blocks.*.o.weight", "residual"),
    ("*.blocks.*.down.weight", "residual"),
    ("*.blocks.*.weight", "normal"),
    ("embed.*.weight", "normal"),
    ("*.project.weight", "normal"),
    ("*.position.weight", "normal"),
    ("*.score_bias.weight", "normal"),
    ("head.*weight", "normal"),
    ("pooler.weight", "normal"),
)


DRAWN_AT_ONCE = 2**20
"""Numbers of a tensor that one generator draws."""


def build(
    config: c.ModelConfig | str,
    seed: int = 0,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Model:
    """A model with fresh weights. The same config and seed give the same weights, whatever the device or dtype.

    `config` is a ModelConfig or the name of a preset, such as "gpt2".
    It comes in evaluation mode (no dropout), as a loaded one does; `model.train()` switches. On device "meta" nothing
    is allocated: shapes only.

    >>> import glassformer as gf
    >>> model = gf.build("gpt2", device="meta")
    >>> sum(p.numel() for p in model.parameters())
    124439808
    """
    model = allocate(presets.get(config) if isinstance(config, str) else config, device, dtype)
    if model.device.type != "meta":
        init_weights(model, seed)
    return model


def allocate(config: c.ModelConfig, device: str | torch.device, dtype: torch.dtype = torch.float32) -> Model:
    """Return a model whose weights have memory and no values yet; on device "meta" they have no memory either."""
    with torch.device("meta"), _Unfilled():
        model = _construct(config)
    model = model.to(dtype).eval()
    if torch.device(device).type == "meta":
        return model
    # as `to_empty`, whose `empty_like` of a meta tensor imports torch's compiler: a second or two for nothing
    return model._apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device=device))


class _Unfilled(TorchFunctionMode):
    """Modules are made without their own first values, which TABLE replaces.

    On the meta device torch would import its compiler, a second, to do nothing.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return None
        return func(*args, **(kwargs or {}))


def _construct(config: c.ModelConfig) -> Model:
    match config:
        case c.DecoderConfig():
            return DecoderLM(config)
        case c.EncoderConfig():
            return EncoderLM(config)
        case c.Seq2SeqConfig():
            return Seq2Seq(config)
    raise TypeError(
        f"cannot build a model from {type(config).__name__}: give a DecoderConfig, EncoderConfig or Seq2SeqConfig, or "
        "the name of a preset."
    )


@torch.no_grad()
def init_weights(model: Model, seed: int, meanwhile: Callable[[], object] | None = None) -> None:
    """Fill every parameter from TABLE, drawing on the CPU in float32 so that devices and dtypes agree.

    `meanwhile` is called while threads draw large weights. It must not read weights.
    """
    generator, device = torch.Generator().manual_seed(seed), model.device
    # copies are launched on the stream of this thread, on which the memory was allocated
    stream = (torch.cuda.set_stream, (torch.cuda.current_stream(device),)) if device.type == "cuda" else (None, ())
    with ThreadPoolExecutor(torch.get_num_threads(), "drawing", *stream) as pool:
        started = [_fill(model, name, p.detach(), generator, pool) for name, p in model.named_parameters()]
        if meanwhile is not None:
            meanwhile()
    for job in (job for jobs in started for job in jobs):
        job.result()
    for buffer in model.buffers():  # corrections of routers
        buffer.zero_()


def initial_values(model: Model, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the first value of each parameter on the CPU, one after the other; none is kept here."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(name: str, shape: torch.Size) -> Tensor:
        value = torch.empty(shape)
        for job in _fill(model, name, value, generator, pool):
            job.result()
        return value

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for name, parameter in model.named_parameters():
            yield name, drawn(name, parameter.shape)


def _fill(
    model: Model, name: str, target: Tensor, generator: torch.Generator, pool: ThreadPoolExecutor
) -> list[Future[None]]:
    """Fill a tensor with the first value of the named parameter; return the jobs of the pool that still draw parts.

    A large tensor is drawn in parts by several threads, each part from a seed of its own. The values do not depend on
    the number of threads: parts are as large on every machine.
    """
    kind, std = distribution(name), model.config.init_std
    if kind in ("one", "zero"):
        offset = getattr(model.get_submodule(name.rpartition(".")[0]), "offset", 0.0)
        target.fill_(1.0 - offset if kind == "one" else 0.0)
        return []
    if kind == "residual":
        std /= math.sqrt(_residual_branches(model.config, name))
    parts = target.view(-1).split(DRAWN_AT_ONCE)
    if len(parts) < 2:
        _draw(target, std, generator)
        return []
    # torch seeds its generator of a CPU with 32 bits
    first = int(torch.randint(2**32, (), generator=generator))
    own = (torch.Generator().manual_seed((first + number) % 2**32) for number in range(len(parts)))
    return [pool.submit(_draw, part, std, generator) for part, generator in zip(parts, own, strict=True)]


def _draw(target: Tensor, std: float, generator: torch.Generator) -> None:
    """Draw N(0, std^2) in float32 on the CPU: in place, or in a buffer that is copied while others are drawn."""
    if target.device.type == "cpu" and target.dtype is torch.float32:
        target.normal_(0.0, std, generator=generator)
    else:
        drawn = torch.empty(target.shape, pin_memory=target.is_cuda).normal_(0.0, std, generator=generator)
        target.copy_(drawn, non_blocking=True)


def distribution(name: str) -> str:
    """The entry of TABLE that a parameter's name falls under."""
    for pattern, kind in TABLE:
        if fnmatch.fnmatchcase(name, pattern):
            return kind
    raise KeyError(f"parameter {name} matches no row of the table of initial distributions")


def _residual_branches(config: c.ModelConfig, name: str) -> int:
    """How many branches are added to the stream that this parameter writes to."""
    per_block = 1 if isinstance(config.feedforward, c.NoFeedForward) else 2
    if isinstance(config, c.Seq2SeqConfig):
        if name.startswith("encoder."):
            return per_block * config.n_encoder_layers
        return (per_block + 1) * config.n_layers
    return per_block * config.n_layers


def n_parameters(model: nn.Module) -> int:
    """Scalars in the model; a shared (tied) tensor counts once."""
    return sum(p.numel() for p in model.parameters())


def modules_of(*models: nn.Module) -> list[nn.Module]:
    """Return all modules of some models, a shared one more than once. `modules()` takes four times as long."""
    found: list[nn.Module] = []
    level: list[nn.Module] = list(models)
    while level:
        found += level
        level = [part for module in level if module._modules for part in module._modules.values() if part is not None]
    return found
