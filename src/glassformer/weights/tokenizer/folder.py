"""Find and read the tokenizer and the chat template of a model folder."""

from pathlib import Path
from typing import Any

from glassformer.weights.errors import WeightsError
from glassformer.weights.tensors import read_json
from glassformer.weights.tokenizer.ends import add_ends, ends, token_text
from glassformer.weights.tokenizer.ranks import SUFFIX, is_ranks, read_ranks
from glassformer.weights.tokenizer.sentencepiece import FILES, read_sentencepiece

TOKENIZER_CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"


def read_tokenizer(folder: Path) -> Any:
    """Return the `tokenizers.Tokenizer` of a folder without a tokenizer.json; None if it has no other file of one."""
    found = [folder / name for name in FILES if (folder / name).is_file()] + sorted(folder.glob(f"*{SUFFIX}"))
    if not found:
        return None
    file, config = found[0], _optional(folder / TOKENIZER_CONFIG)
    tokenizer = read_ranks(file) if is_ranks(file) else read_sentencepiece(file).tokenizer()
    _add_tokens(tokenizer, config)
    add_ends(tokenizer, *ends(_optional(folder / "config.json").get("model_type"), config))
    return tokenizer


def _optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _add_tokens(tokenizer: Any, config: dict[str, Any]) -> None:
    """Add the tokens of tokenizer_config.json that the vocabulary does not have, in the order of their ids."""
    from tokenizers import AddedToken

    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return
    entries = sorted((int(i), entry) for i, entry in listed.items() if i.isdigit() and isinstance(entry, dict))
    for i, entry in entries:
        text = entry.get("content")
        if not isinstance(text, str):
            continue
        known, size = tokenizer.token_to_id(text), tokenizer.get_vocab_size()
        if known not in (None, i) or (known is None and i != size):
            raise WeightsError(
                f"{TOKENIZER_CONFIG} gives the token {text!r} the id {i}, but its vocabulary would give it "
                f"{size if known is None else known}: the files do not belong together."
            )
        flags = {key: bool(entry.get(key)) for key in ("special", "lstrip", "rstrip", "single_word", "normalized")}
        tokenizer.add_tokens([AddedToken(text, **flags)])


def read_chat_template(folder: Path) -> str | None:
    """Return the chat template of a folder (Jinja); None if it has none."""
    if (folder / TEMPLATE).is_file():
        return (folder / TEMPLATE).read_text(encoding="utf-8")
    for name in ("chat_template.json", TOKENIZER_CONFIG):
        template = _optional(folder / name).get("chat_template")
        if isinstance(template, list):  # several, each with a name
            named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
            template = named.get("default")
        if isinstance(template, str):
            return template
    return None


def read_special_tokens(folder: Path) -> dict[str, str]:
    """Return the texts of named tokens, such as `bos_token`, which chat templates refer to."""
    found = _optional(folder / "special_tokens_map.json") | _optional(folder / TOKENIZER_CONFIG)
    texts = {name: token_text(value) for name, value in found.items() if name.endswith("_token")}
    return {name: text for name, text in texts.items() if text is not None}
