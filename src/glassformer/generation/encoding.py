"""Hidden states of texts of unequal length by an encoder: compiled kernels without padding, or torch with it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from glassformer.config.choices import Engine, Precision
from glassformer.errors import GlassformerError
from glassformer.generation.engine import EngineError
from glassformer.generation.request import encode_text, is_text, tokenizer_of
from glassformer.generation.state import evaluating, pad
from glassformer.model import EncoderLM
from glassformer.shapes import Float


def encode(
    model: EncoderLM,
    texts: str | Sequence[str] | Sequence[Sequence[int]],
    segments: Sequence[Sequence[int]] | None = None,
    engine: Engine = "auto",
    precision: Precision = "auto",
) -> list[Float[Tensor, "T D"]]:
    """Return the hidden states (tokens, width) of each text, after the last block.

    `texts` are lists of token ids, one text, or a list of texts if the model was loaded with a tokenizer. They may have
    unequal lengths: each gets what it would get alone. `segments` are the segment ids of each token.

    The compiled kernels of a CPU (`engine="native"`) compute real tokens only, in the precisions of decoding;
    "torch" pads the texts to one batch. "auto" uses the kernels if they support the model and a compiler is there.

    >>> states = gf.encode(gf.build(gf.presets.bert_base(n_layers=1)), [[101, 2054, 102], [101, 102]])
    >>> [tuple(one.shape) for one in states]
    [(3, 768), (2, 768)]
    """
    if not isinstance(model, EncoderLM):
        raise ValueError(
            f"{type(model).__name__} is not an encoder: gf.encode needs one, such as gf.load returns for BERT."
        )
    if is_text(texts):
        tokenizer, given = tokenizer_of(model), [texts] if isinstance(texts, str) else list(texts)
        if tokenizer is None:
            raise ValueError("this model has no tokenizer: pass lists of token ids, or load it from a folder with one.")
        texts = [encode_text(tokenizer, text) for text in given]  # type: ignore[arg-type]
    ids: list[list[int]] = [list(text) for text in texts]  # type: ignore[arg-type]
    if not ids or not all(ids):
        raise ValueError("there is no text, or an empty one: give at least one token for each text.")
    _check_ids(model, ids, segments)
    if engine != "torch":
        try:
            return _by_kernels(model, ids, segments, precision)
        except GlassformerError as error:
            if engine == "native" or precision not in ("auto", "float32"):
                raise EngineError(f"{str(error).rstrip('.')}, or use engine='torch'.") from None
    elif precision not in ("auto", "float32", "bfloat16"):
        raise EngineError(f"precision={precision!r} needs the compiled kernels: use engine='native' or 'auto'.")
    return _by_torch(model, ids, segments, precision)


def _check_ids(model: EncoderLM, ids: list[list[int]], segments: Sequence[Sequence[int]] | None) -> None:
    size, longest = model.config.vocab_size, max(map(len, ids))
    outside = next((token for text in ids for token in text if not 0 <= token < size), None)
    if outside is not None:
        raise ValueError(f"token id {outside} is outside the vocabulary of {size} (0 to {size - 1}).")
    limit = model.encoder.max_position
    if limit is not None and longest > limit:
        raise ValueError(f"a text has {longest} tokens and the model has positions for {limit}: shorten it.")
    if segments is not None and [len(one) for one in segments] != [len(text) for text in ids]:
        raise ValueError("segments must have one id for each token of each text.")


def _by_kernels(
    model: EncoderLM, ids: list[list[int]], segments: Sequence[Sequence[int]] | None, precision: Precision
) -> list[Tensor]:
    try:
        from glassformer.kernels.cpu.decode import NativeEncoder
    except ImportError:
        raise EngineError("the compiled kernels are not installed.") from None
    if model.embed.tokens.weight.dtype is torch.float64:
        raise EngineError("the kernels compute in float32 and the model's weights are float64.")
    with evaluating(model):
        return NativeEncoder(model, "float32" if precision == "auto" else precision).encode(ids, segments)


def _by_torch(
    model: EncoderLM, ids: list[list[int]], segments: Sequence[Sequence[int]] | None, precision: Precision
) -> list[Tensor]:
    tokens, mask = pad(ids, "right", model.device)
    kinds = None if segments is None else pad([list(one) for one in segments], "right", model.device)[0]
    dtype = torch.bfloat16 if precision == "bfloat16" else model.embed.tokens.weight.dtype
    with evaluating(model), torch.autocast(model.device.type, dtype, enabled=precision == "bfloat16"):
        states = model.encode(tokens, mask, segments=kinds)
    return [row[: len(text)] for row, text in zip(states, ids, strict=True)]
