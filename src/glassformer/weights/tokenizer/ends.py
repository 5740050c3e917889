"""Tokens that families put in front of a text and behind it, for tokenizer files that do not say so themselves.

A `tokenizer.json` has them in its post-processor. A sentencepiece model and a tiktoken file have not: `add_bos_token`
and `add_eos_token` of tokenizer_config.json decide, and otherwise the habit of the family.
"""

from typing import Any

FRONT = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "gemma", "gemma2", "gemma3", "gemma3_text"), "bos"),
    **dict.fromkeys(("cohere", "cohere2", "deepseek_v2", "deepseek_v3", "bart", "mbart", "camembert"), "bos"),
    **dict.fromkeys(("xlm-roberta", "roberta"), "bos"),
    "opt": "eos",
}
"""model_type -> the token in front of a text. Families that are not listed have none."""
BACK = {
    **dict.fromkeys(("t5", "mt5", "umt5", "marian", "pegasus", "bart", "mbart"), "eos"),
    **dict.fromkeys(("camembert", "xlm-roberta", "roberta"), "eos"),
}
"""model_type -> the token behind a text. Families that are not listed have none."""


def ends(model_type: object, config: dict[str, Any]) -> tuple[str | None, str | None]:
    """Return the tokens in front of a text and behind it.

    `config` is tokenizer_config.json. It also has the texts of the tokens; the defaults are those of sentencepiece.
    """
    texts = {"bos": token_text(config.get("bos_token")) or "<s>", "eos": token_text(config.get("eos_token")) or "</s>"}
    front, back = FRONT.get(str(model_type)), BACK.get(str(model_type))
    if isinstance(config.get("add_bos_token"), bool):
        front = "bos" if config["add_bos_token"] else None
    if isinstance(config.get("add_eos_token"), bool):
        back = "eos" if config["add_eos_token"] else None
    return (None if front is None else texts[front], None if back is None else texts[back])


def token_text(value: Any) -> str | None:
    """Return the text of a token in tokenizer_config.json, where it is a text or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def add_ends(tokenizer: Any, front: str | None, back: str | None) -> None:
    """Let a tokenizer put tokens in front of a text and behind it. Tokens that it does not have are left out."""
    from tokenizers import processors

    kept = [token for token in (front, back) if token is not None and tokenizer.token_to_id(token) is not None]
    if not kept:
        return
    first = [front] if front in kept else []
    last = [back] if back in kept else []
    single = [*first, "$A", *last]
    pair = [*single, *(f"{token}:1" for token in first), "$B:1", *(f"{token}:1" for token in last)]
    tokens = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(kept)]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=tokens)
