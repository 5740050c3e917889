"""What a model has read, kept between the turns of a conversation: the next prompt computes only what differs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from glassformer.errors import GlassformerError
from glassformer.generation.engine import (
    WORTH_COMPILING,
    Call,
    Implementation,
    choose_engine,
    fall_back,
    in_precision,
    make_state,
)
from glassformer.generation.request import GenerationRequest
from glassformer.generation.state import DecodeState, TorchState
from glassformer.model import Cache, DecoderLM, Model
from glassformer.shapes import Float, Int

SMALLEST = 256
"""Tokens for which the first cache has room; a larger one has room for twice as many, and so on."""


class KeptCache:
    """A KV cache of one sequence that outlives a generation: by compiled kernels of a CPU, or by torch.

    On a GPU nothing is kept where kernels decode: reading a conversation again takes them less time than a few steps.
    """

    def __init__(self, model: DecoderLM):
        self.model = model
        self.kept: TorchCache | KernelCache | None = None
        self.is_long = False
        """True if keys have the rotary frequencies of long sequences."""

    def state(self, request: GenerationRequest) -> tuple[DecodeState, Implementation]:
        """Return the decode state of a request for one sequence, and what computes it, as `make_state` does."""
        call = Call.of(self.model, request)
        # an answer of any length is worth the compiler: others follow
        call = replace(call, max_new_tokens=max(call.max_new_tokens, WORTH_COMPILING))
        chosen = choose_engine(call, request.engine, request.precision)
        if chosen.kernel is not None and chosen.kernel.make is None:
            self.kept = None
            # turns that need a little more room would capture steps of their own
            return make_state(self.model, request, roomy(request.capacity, self.model.config.max_len))
        limit = self.model.config.changes_frequencies_at
        is_long = limit is not None and call.prompt_tokens > limit
        if is_long is not self.is_long:
            self.kept, self.is_long = None, is_long
        if chosen.kernel is not None:
            try:
                return self._by_kernel(request, chosen), chosen
            except GlassformerError as error:
                chosen = fall_back(call, request, error)
        return self._by_torch(request, chosen), chosen

    def _by_kernel(self, request: GenerationRequest, chosen: Implementation) -> DecodeState:
        if not isinstance(self.kept, KernelCache) or self.kept.chosen != chosen:
            self.kept = KernelCache(self.model, chosen)
        return KernelTurn(self.kept, request)

    def _by_torch(self, request: GenerationRequest, chosen: Implementation) -> DecodeState:
        model = in_precision(self.model, getattr(torch, chosen.precision))
        if not isinstance(self.kept, TorchCache) or self.kept.model.dtype != model.dtype:
            self.kept = TorchCache(model)
        return TorchTurn(self.kept, request)


def shared_prefix(held: Sequence[int], ids: Sequence[int]) -> int:
    """Return how many tokens of a prompt need not be read again. Its last one is always read: it gives the logits."""
    shared = 0
    while shared < min(len(held), len(ids) - 1) and held[shared] == ids[shared]:
        shared += 1
    return shared


def roomy(needed: int, most: int | None) -> int:
    """Return a capacity that leaves room for later turns: it doubles, up to the context of the model."""
    size = SMALLEST
    while size < needed:
        size *= 2
    return max(needed, min(size, most or size))


class KernelCache:
    """The cache of a compiled decoder."""

    def __init__(self, model: DecoderLM, chosen: Implementation):
        self.model, self.chosen = model, chosen
        self.decoder: Any = None
        self.tokens: list[int] = []
        """The tokens whose keys and values are in the cache."""

    def prepare(self, ids: list[int]) -> int:
        """Keep the longest prefix that a prompt shares with what was read, and return its length."""
        shared = shared_prefix(self.tokens, ids)
        self.make_room(len(ids))
        self.decoder.crop(0, shared)
        self.tokens = ids[:shared]
        return shared

    def make_room(self, needed: int) -> None:
        """Let the cache hold so many tokens. An answer may be long, but most are not, so it grows with it."""
        if self.decoder is not None and self.decoder.capacity >= needed:
            return
        assert self.chosen.kernel is not None
        assert self.chosen.kernel.make is not None
        capacity = roomy(needed, self.model.config.max_len)
        larger: Any = self.chosen.kernel.make(self.model, 1, capacity, self.chosen.precision)
        if self.decoder is not None:
            larger.take(self.decoder)
        self.decoder = larger


class KernelTurn:
    """The decode state of one generation over the cache of a compiled decoder."""

    begin = None

    def __init__(self, kept: KernelCache, request: GenerationRequest):
        self.model: Model = kept.model
        self.modules: list[nn.Module] = []  # the steps call none
        self.kept, self.prompts = kept, request.prompts
        self.reused = kept.prepare(self.prompts[0])
        self.owns_threads: bool = kept.decoder.owns_threads

    def start(self) -> Float[Tensor, "B V"]:
        logits: Tensor = self.kept.decoder.read([self.prompts[0][self.reused :]])
        self.kept.tokens = list(self.prompts[0])
        return logits

    def step(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        self.kept.make_room(len(self.kept.tokens) + 1)
        logits: Tensor = self.kept.decoder.step(tokens)
        self.kept.tokens += tokens.tolist()
        return logits

    def reorder(self, parents: Int[Tensor, "N"]) -> None:
        raise NotImplementedError  # a kept cache has one sequence


class TorchCache:
    """The cache of the model itself."""

    def __init__(self, model: DecoderLM):
        self.model = model
        self.cache: Cache | None = None
        self.tokens: list[int] = []
        """The tokens whose keys and values are in the cache."""
        self.complete = True
        """False while the model computes: a forward pass that was interrupted leaves layers of unequal length."""

    def prepare(self, ids: list[int], new: int) -> Cache:
        """Return the cache with the longest common prefix in it, and room for the prompt and `new` tokens."""
        if self.cache is None or not self.complete:
            self.cache, self.tokens = None, []
        shared, needed = shared_prefix(self.tokens, ids), len(ids) + new
        if self.cache is None:
            self.cache = self.model.new_cache("static", capacity=self._capacity(needed))
        elif needed > (self.cache.capacity or needed):
            self.cache.enlarge(self._capacity(needed))
        self.cache.crop(shared)
        self.tokens, self.complete = ids[:shared], True
        return self.cache

    def _capacity(self, needed: int) -> int:
        return roomy(needed, self.model.config.max_len)


class TorchTurn(TorchState):
    """The decode state of one generation over the cache of the model itself."""

    def __init__(self, kept: TorchCache, request: GenerationRequest):
        ids = request.prompts[0]
        self.model, self.kept, self.chunk = kept.model, kept, None
        self.memory = self.source_mask = self.real = None
        self.prompts, self.tokens = [ids], torch.tensor([ids], device=kept.model.device)
        self.cache: Cache = kept.prepare(ids, request.max_new_tokens)
        self.reused = len(self.cache)

    def start(self) -> Float[Tensor, "B V"]:
        return self._read(self.tokens[:, len(self.cache) :])

    def step(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        self.tokens = torch.cat([self.tokens, tokens[:, None]], dim=1)
        return self._read(tokens[:, None])

    def _read(self, tokens: Tensor) -> Tensor:
        self.kept.complete = False
        hidden = self.model.decoder(self.model.embed(tokens), cache=self.cache)
        logits: Tensor = self.model.logits(hidden[:, -1:])[:, 0]
        self.kept.tokens += tokens[0].tolist()
        self.kept.complete = True
        return logits
