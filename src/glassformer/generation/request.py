"""What one call of `generate` or `stream` asks for: read and validated once, here, before any work is done."""

import operator
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import numpy as np
from torch import Tensor

from glassformer.config import Special
from glassformer.config.choices import Engine, Precision
from glassformer.errors import plural
from glassformer.generation.constraints import Constraints
from glassformer.generation.sampling import GREEDY, Sampling
from glassformer.model import DecoderLM, EncoderLM, Model, Seq2Seq
from glassformer.model.cache import CacheKind

Prompts = Sequence[Sequence[int]] | Tensor | str | Sequence[str]
Stop = int | Sequence[int | Sequence[int]] | None
Draft = DecoderLM | Literal["lookup"]


class Options(TypedDict, total=False):
    """The optional arguments that `generate` and `stream` share; `generate` describes them."""

    sampling: Sampling | None
    cache: bool | CacheKind
    seed: int | Sequence[int]
    stop: Stop
    prefill_chunk: int | None
    engine: Engine
    precision: Precision
    draft: Draft | None
    draft_tokens: int


@dataclass(frozen=True)
class GenerationRequest:
    """A validated call: prompts are lists of token ids, `stops` are lists of ids, there is one seed per prompt."""

    prompts: list[list[int]]
    max_new_tokens: int
    sampling: Sampling = GREEDY
    stops: tuple[list[int], ...] = ()
    seeds: tuple[int, ...] = (0,)
    cache: CacheKind | None = "static"
    prefill_chunk: int | None = None
    engine: Engine = "auto"
    precision: Precision = "auto"
    draft: Draft | None = None
    draft_tokens: int = 4
    beams: int = 1
    special: Special = Special()
    """The tokens that the model's config forces or suppresses."""

    @property
    def constraints(self) -> Constraints | None:
        """What the config of the model forces or suppresses in this call; None if nothing."""
        return Constraints(self.special, self.max_new_tokens) if self.special.limits_generation else None

    @property
    def capacity(self) -> int:
        """Number of tokens of the longest sequence when it is complete."""
        return max(map(len, self.prompts)) + self.max_new_tokens


def read_request(
    model: Model,
    prompts: Prompts,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    cache: bool | CacheKind = True,
    seed: int | Sequence[int] = 0,
    stop: Stop = None,
    prefill_chunk: int | None = None,
    engine: Engine = "auto",
    precision: Precision = "auto",
    draft: Draft | None = None,
    draft_tokens: int = 4,
    beams: int = 1,
) -> GenerationRequest:
    """Return the request for the arguments of `generate`. Everything that cannot be done is refused in one sentence."""
    if type(beams) is not int or beams < 1:
        raise ValueError(f"beams={beams!r} must be a whole number of at least 1.")
    if not isinstance(model, DecoderLM | EncoderLM | Seq2Seq):
        name = f"gf.load({model!r})" if isinstance(model, str) else "gf.load or gf.build"
        raise ValueError(f"the model is of type {type(model).__name__}: pass a model, such as {name} returns.")
    if not isinstance(sampling, Sampling | None):
        raise ValueError(f"sampling={sampling!r} must be a gf.Sampling, such as gf.Sampling(temperature=0.8).")
    found = read_prompts(model, prompts)
    if draft is not None and beams > 1:
        raise ValueError(f"beam search follows many sequences and cannot use a draft: leave it out (beams={beams}).")
    check_length(model, found, max_new_tokens)
    if cache is not False:
        check_frequencies(model, found, max_new_tokens)
    if draft is not None:
        check_draft(model, draft, draft_tokens, max(map(len, found)), max_new_tokens)
    if prefill_chunk is not None and (type(prefill_chunk) is not int or prefill_chunk < 1):
        raise ValueError(f"prefill_chunk={prefill_chunk!r} must be a whole number of at least 1.")
    return GenerationRequest(
        prompts=found,
        max_new_tokens=max_new_tokens,
        sampling=sampling or GREEDY,
        stops=tuple(read_stop(model, stop)),
        seeds=tuple(read_seeds(seed, len(found))),
        cache="static" if cache is True else None if cache is False else cache,
        prefill_chunk=prefill_chunk,
        engine=engine,
        precision=precision,
        draft=draft,
        draft_tokens=draft_tokens,
        beams=beams,
        special=model.config.special,
    )


def is_text(prompts: object) -> bool:
    """Return whether prompts are a text, or a list of texts."""
    if isinstance(prompts, str):
        return True
    return isinstance(prompts, list | tuple) and bool(prompts) and all(isinstance(one, str) for one in prompts)


def read_prompts(model: Model, prompts: Prompts) -> list[list[int]]:
    """Return prompts as lists of token ids, checked against the vocabulary. Texts are encoded by the model's tokenizer.

    Everything that is not a prompt is refused in one sentence.
    """
    if isinstance(model, EncoderLM):
        raise ValueError("an encoder-only model predicts masked tokens, not the next token: it cannot generate text.")
    if is_text(prompts):
        return _encode(model, [prompts] if isinstance(prompts, str) else list(prompts))  # type: ignore[arg-type]
    listed: Any = _to_lists(prompts) if hasattr(prompts, "tolist") else prompts
    if not isinstance(listed, Sequence) or isinstance(listed, bytes | bytearray):
        raise ValueError(f"prompts are of type {type(prompts).__name__}: pass a list of lists of token ids.")
    if not listed:
        raise ValueError("there is no prompt: pass at least one list of token ids.")
    return [_read_prompt(number, prompt, model.config.vocab_size) for number, prompt in enumerate(listed)]


def _encode(model: Model, texts: list[str]) -> list[list[int]]:
    tokenizer = tokenizer_of(model)
    if tokenizer is None:
        raise ValueError(
            f"the prompt {shorten(texts[0])!r} is text, and the model carries no tokenizer (it was not loaded from a "
            "folder with a tokenizer.json): pass token ids, such as [tokenizer.encode(text).ids]."
        )
    encoded = [encode_text(tokenizer, text) for text in texts]
    return [_read_prompt(number, prompt, model.config.vocab_size) for number, prompt in enumerate(encoded)]


def tokenizer_of(model: Model) -> Any | None:
    """Return the tokenizer of the folder or file that a model was loaded from; None if there is none."""
    origin: Any = getattr(model, "origin", None)
    return None if origin is None else origin.tokenizer()


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text."""
    try:
        return list(tokenizer.encode(text).ids)
    except Exception as error:  # the library raises plain Exception for what its vocabulary lacks
        for character in text:
            try:
                tokenizer.encode(character)
            except Exception:
                raise ValueError(
                    f"the prompt holds {character!r} (U+{ord(character):04X}), which is not one of the "
                    f"{tokenizer.get_vocab_size()} tokens of this model: leave it out."
                ) from None
        raise ValueError(f"the tokenizer cannot encode the prompt: {error}.") from None


def shorten(text: str) -> str:
    """Return at most 40 characters of a text, for a message."""
    return text if len(text) <= 40 else f"{text[:39]}…"


def _to_lists(prompts: Any) -> Any:
    """Return a tensor or an array as lists."""
    kind = str(prompts.dtype).removeprefix("torch.")
    if not kind.startswith(("int", "uint")):
        raise ValueError(f"prompts are of dtype {kind}: token ids are whole numbers, convert them to int64.")
    if len(prompts.shape) != 2:
        raise ValueError(
            f"prompts have shape {tuple(prompts.shape)}: it must be (batch, length); use prompts[None] for one."
        )
    return prompts.tolist()


def _read_prompt(number: int, prompt: Any, vocabulary: int) -> list[int]:
    """Return one prompt as a list, with each of its ids checked."""
    if isinstance(prompt, int):
        raise ValueError("prompts are lists of token ids, one list per sequence: wrap a single prompt as [prompt].")
    if isinstance(prompt, str | bytes) or not (isinstance(prompt, Sequence) or hasattr(prompt, "tolist")):
        raise ValueError(f"prompt {number} is {prompt!r}: pass a list of token ids, or texts only.")
    if hasattr(prompt, "shape") and len(prompt.shape) != 1:
        raise ValueError(f"prompt {number} has shape {tuple(prompt.shape)}: it must be one-dimensional.")
    tokens = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
    if not tokens:
        raise ValueError(f"prompt {number} is empty: a model needs at least one token to continue.")
    if _are_ids(tokens, vocabulary):
        return tokens
    found = []
    for token in tokens:
        try:
            found.append(-1 if isinstance(token, bool) else operator.index(token))
        except TypeError:
            raise ValueError(
                f"prompt {number} contains {token!r}, of type {type(token).__name__}: token ids are whole numbers."
            ) from None
        if not 0 <= found[-1] < vocabulary:
            raise ValueError(f"prompt {number} has token id {token}: ids go from 0 to {vocabulary - 1}.")
    return found


def _are_ids(tokens: list[Any], vocabulary: int) -> bool:
    """Return whether tokens are plain ints within a vocabulary, by loops in C: the GPU waits for this check."""
    if operator.countOf(map(type, tokens), int) != len(tokens):
        return False
    try:
        return bool(np.frombuffer(array("Q", tokens), np.uint64).max() < vocabulary)
    except OverflowError:  # negative, or more than 64 bits
        return False


def check_frequencies(model: Model, prompts: list[list[int]], max_new_tokens: int) -> None:
    """Refuse to grow a cached sequence beyond the length at which the rotary frequencies of a model change."""
    limit = model.config.changes_frequencies_at
    if limit is None or isinstance(model, Seq2Seq):
        return
    for length in map(len, prompts):
        if length <= limit < length + max_new_tokens:
            raise ValueError(
                f"a prompt of {length} tokens and max_new_tokens={max_new_tokens} exceed {limit} tokens, where the "
                f"rotary frequencies of this model change, also for cached keys: ask for {limit - length} new tokens "
                "or fewer, or pass cache=False to compute everything anew for each token."
            )


def check_length(model: Model, prompts: list[list[int]], max_new_tokens: int) -> None:
    """Refuse what the context cannot hold, before any work is done."""
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens!r} must be a whole number of at least 1.")
    limit = model.config.max_len
    if limit is None:
        return
    longest = max(map(len, prompts))
    if isinstance(model, Seq2Seq):
        if longest > limit:
            raise ValueError(f"a source of {longest} tokens is longer than the context of {limit}: shorten it.")
        longest = 1
    elif longest >= limit:
        raise ValueError(
            f"a prompt of {longest} tokens fills the context of {limit}: shorten it to {limit - 1} or less."
        )
    if longest + max_new_tokens > limit:
        raise ValueError(
            f"a prompt of {longest} tokens and max_new_tokens={max_new_tokens} exceed the context of {limit}: "
            f"ask for {limit - longest} new tokens or fewer."
        )


def read_stop(model: Model, stop: Stop) -> list[list[int]]:
    """Return stop sequences as lists of ids."""
    if stop is None:
        stop = list(model.config.special.eos)
    if isinstance(stop, int):
        stop = [stop]
    if isinstance(stop, str) or not all(_is_ids(s) for s in stop):
        raise ValueError(
            f"stop={stop!r} must be token ids, or lists of them: encode a text with the model's tokenizer."
        )
    sequences = [[s] if isinstance(s, int) else list(s) for s in stop]
    if any(not s for s in sequences):
        raise ValueError("a stop sequence is empty: it would end every sequence at once.")
    return sequences


def _is_ids(stop: object) -> bool:
    return isinstance(stop, int) or (isinstance(stop, Sequence) and all(isinstance(token, int) for token in stop))


def read_seeds(seed: int | Sequence[int], prompts: int) -> list[int]:
    """Return one seed per prompt."""
    seeds = list(seed) if isinstance(seed, Sequence) else [seed] * prompts
    if not all(type(one) is int for one in seeds):
        raise ValueError(f"seed={seed!r} must be a whole number, or one for each prompt.")
    if len(seeds) != prompts:
        raise ValueError(
            f"{plural(len(seeds), 'seed')} for {plural(prompts, 'prompt')}: give one number, or one per prompt."
        )
    return seeds


def check_draft(model: Model, draft: object, draft_tokens: int, longest: int, max_new_tokens: int) -> None:
    """Refuse a draft that cannot propose tokens for this model."""
    if type(draft_tokens) is not int or draft_tokens < 1:
        raise ValueError(f"draft_tokens={draft_tokens!r} must be a whole number of at least 1.")
    if not isinstance(model, DecoderLM):
        raise ValueError("only a decoder-only model can be sped up by a draft, and this one is not: leave draft out.")
    if model.config.special.limits_generation:
        raise ValueError("the config forces or suppresses tokens, which a draft does not know: leave draft out.")
    if isinstance(draft, str) and draft == "lookup":
        return
    if not isinstance(draft, DecoderLM):
        what = repr(draft) if isinstance(draft, str) else f"a {type(draft).__name__}"
        raise ValueError(f"draft is {what}: give a decoder-only model, or 'lookup' to copy from the sequence itself.")
    ours, theirs = model.config.vocab_size, draft.config.vocab_size
    if ours != theirs:
        raise ValueError(f"the draft knows {theirs} tokens and the model {ours}: they must share one vocabulary.")
    limit = draft.config.max_len
    if limit is not None and longest + max_new_tokens > limit:
        raise ValueError(
            f"a prompt of {longest} tokens and max_new_tokens={max_new_tokens} exceed the draft's context of {limit}: "
            "ask for fewer tokens, or use a draft with as long a context as the model."
        )
