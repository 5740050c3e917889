"""The tokenizer that belongs to a model, and text to token ids."""

from typing import Any

from glassformer.model import Model


def tokenizer_of(model: Model) -> Any | None:
    """Return the tokenizer of the folder that a model was loaded from; None if there is none."""
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
