"""The tokenizer of a model that a run starts from, with tokens added."""

import json
from pathlib import Path

from glassformer.config import ConfigError, ModelConfig
from glassformer.training.data.tokenizer import JsonTokenizer, Tokenizer, from_json
from glassformer.training.data.tokenizer import load as load_file
from glassformer.weights import load_tokenizer

MASKS = ("[MASK]", "<mask>", "<MASK>", "<|mask|>")
"""Names under which tokenizers have a mask token."""


def own_tokenizer(place: Path) -> Tokenizer | None:
    """Return the tokenizer of a model folder or file; None if it has none."""
    engine = load_tokenizer(place)  # checks that it fits the model
    if engine is None:
        return None
    file = place / "tokenizer.json"
    text = file.read_text(encoding="utf-8") if file.is_file() else engine.to_str(pretty=True)
    return from_json(text, str(file))


def same_tokenizer(given: str, own: Tokenizer) -> bool:
    """Return whether data.tokenizer means the tokenizer of the model: the same file content, or its kind."""
    if given in ("char", "byte", "bpe"):
        return own.kind == given
    return bool(json.loads(load_file(given).to_json()) == json.loads(own.to_json()))


def extended(tokenizer: Tokenizer, added: tuple[str, ...]) -> Tokenizer:
    """Return the tokenizer with more special tokens, whose ids follow all known ids.

    An ordinary token that is named becomes a special one and keeps its id.
    """
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Engine

    engine = Engine.from_str(tokenizer.to_json())
    special = {token.content for token in engine.get_added_tokens_decoder().values()}
    for text in added:
        if text in special:
            raise ConfigError(f"data.add_tokens has {text!r}, which the tokenizer of start.model has: leave it out.")
    new = new_tokens(tokenizer, added)
    engine.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in added])
    vocabulary = engine.get_vocab(with_added_tokens=True)
    ids = sorted(vocabulary[text] for text in new)
    if ids != list(range(tokenizer.vocab_size, tokenizer.vocab_size + len(new))):
        raise ConfigError(
            f"data.add_tokens would get the ids {ids}, some of which the tokenizer of start.model uses already: add "
            "them to its tokenizer.json yourself."
        )
    return JsonTokenizer(engine.to_str(pretty=True))


def new_tokens(tokenizer: Tokenizer, added: tuple[str, ...]) -> list[str]:
    """Return those of the added tokens that need a new id."""
    from tokenizers import Tokenizer as Engine

    known = Engine.from_str(tokenizer.to_json()).get_vocab(with_added_tokens=True)
    return [text for text in added if text not in known]


def mask_token(tokenizer: Tokenizer, config: ModelConfig) -> int:
    """Return the id of the mask token: a token of that name, or the id that training adds after all others."""
    vocabulary = json.loads(tokenizer.to_json())
    added = {token["content"]: token["id"] for token in vocabulary.get("added_tokens") or []}
    if isinstance(tokenizer, JsonTokenizer):
        added = tokenizer.engine.get_vocab(with_added_tokens=True)
    found = next((added[name] for name in MASKS if name in added), None)
    if found is not None:
        return int(found)
    if config.vocab_size == tokenizer.vocab_size + 1:
        return tokenizer.vocab_size
    raise ConfigError(
        "start.model is an encoder whose tokenizer has no mask token: set loss.mask_token to its id, or add one with "
        "data.add_tokens=['[MASK]']."
    )
