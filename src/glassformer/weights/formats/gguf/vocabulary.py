"""Tokenizers in GGUF files, in both directions.

llama.cpp has two kinds that language models use: `gpt2` (byte-level BPE with a named splitting rule) and `llama`
(sentencepiece pieces with scores). A tokenizer that is neither is refused, because llama.cpp would give other tokens.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from glassformer.config import Special
from glassformer.weights.errors import WeightsError
from glassformer.weights.tokenizer.ends import add_ends
from glassformer.weights.tokenizer.pieces import BYTE, CONTROL, NORMAL, SPACE, UNKNOWN, UNUSED, USER, Pieces
from glassformer.weights.tokenizer.splits import Split, by_name, byte_signs, recognize

PREFIX = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"
NO_MERGE = "≠ ≠"
"""A merge that never applies, because no byte stands for its sign: llama.cpp does not load BPE without merges."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer of a GGUF file, and notes about what llama.cpp does differently."""

    metadata: dict[str, Any]
    notes: list[str] = field(default_factory=list)


def write_vocabulary(tokenizer: Any, size: int, special: Special, template: str | None) -> Vocabulary:
    """Return the metadata of a tokenizer for a model with `size` tokens. Without a tokenizer there are only ids."""
    ids = {"bos": special.bos, "eos": next(iter(special.eos), None), "padding": special.pad}
    ids["eot"] = special.eos[1] if len(special.eos) > 1 else None
    metadata: dict[str, Any] = {f"{name}_token_id": i for name, i in ids.items() if i is not None}
    if tokenizer is None:
        return Vocabulary(_named({"model": "no_vocab"} | metadata))
    content = json.loads(tokenizer.to_str())
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    notes: list[str] = []
    beyond = sorted(token for token, i in vocabulary.items() if i >= size)
    if beyond:
        added = {token["content"] for token in content["added_tokens"]}
        if not added.issuperset(beyond):
            raise WeightsError(
                f"the tokenizer has {len(vocabulary)} tokens, but the model has {size}: they do not belong together."
            )
        notes.append(f"tokens that the model does not have are left out ({', '.join(beyond[:5])}).")
    kind, parts = _kind(content)
    metadata |= parts | _ends(tokenizer, special, notes)
    tokens = [f"[PAD{i}]" for i in range(size)]
    types = [UNUSED] * size
    for token, i in vocabulary.items():
        if i < size:
            tokens[i], types[i] = token, NORMAL
    for token in content["added_tokens"]:
        if token["id"] < size:
            types[token["id"]] = CONTROL if token["special"] else USER
    if kind == "llama":
        metadata |= _pieces(content, tokens, types)
    elif content["model"]["type"] == "WordLevel":
        signs = byte_signs()
        tokens = [signs[ord(token)] if len(token) == 1 else token for token in tokens]
    if _normalizes(content):
        notes.append("llama.cpp does not normalise text (NFC) before it is encoded, as this tokenizer does.")
    named = {"model": kind, "tokens": tokens, "token_type": types} | metadata
    return Vocabulary(_named(named) | ({TEMPLATE: template} if template else {}), notes)


def _named(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {PREFIX + key: value for key, value in metadata.items()}


def _kind(content: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the kind of a tokenizer.json in llama.cpp, and its rules."""
    model, steps = content["model"], content.get("pre_tokenizer")
    if model["type"] == "BPE" and not _is_metaspace(content):
        split = _split(model, steps)
        if split is None or content.get("normalizer") not in (None, {"type": "NFC"}):
            raise _unknown(content)
        merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
        return "gpt2", {"pre": split.names[0], "merges": merges or [NO_MERGE]}
    if model["type"] == "BPE":
        return "llama", {"add_space_prefix": _has_prefix(content)}
    if model["type"] == "WordLevel" and model["vocab"] and all(len(token) == 1 for token in model["vocab"]):
        if all(ord(token) < 128 for token in model["vocab"]):
            return "gpt2", {"pre": "gpt-2", "merges": [NO_MERGE]}
        return "llama", {"add_space_prefix": False}
    raise _unknown(content)


def _split(model: dict[str, Any], steps: Any) -> Split | None:
    if not model["merges"] and isinstance(steps, dict) and steps.get("type") == "ByteLevel":
        return by_name("gpt-2")  # bytes: no rule changes them
    return recognize(steps, bool(model.get("ignore_merges")))


def _unknown(content: dict[str, Any]) -> WeightsError:
    rules = json.dumps([content["model"]["type"], content.get("normalizer"), content.get("pre_tokenizer")])
    return WeightsError(
        f"the tokenizer cannot be written as GGUF, because llama.cpp has no rule that splits text as it does "
        f"({rules[:200]}): use --to hf or --to glass."
    )


def _is_metaspace(content: dict[str, Any]) -> bool:
    return SPACE in json.dumps([content.get("normalizer"), content.get("pre_tokenizer")], ensure_ascii=False)


def _has_prefix(content: dict[str, Any]) -> bool:
    """Return True if a space is put in front of a text."""
    rules = json.dumps([content.get("normalizer"), content.get("pre_tokenizer")])
    return any(sign in rules for sign in ('"Prepend"', '"prepend_scheme": "first"', '"prepend_scheme": "always"'))


def _normalizes(content: dict[str, Any]) -> bool:
    return content.get("normalizer") == {"type": "NFC"}


def _ends(tokenizer: Any, special: Special, notes: list[str]) -> dict[str, Any]:
    """Return whether llama.cpp has to put tokens in front of a text and behind it."""
    try:
        plain = tokenizer.encode("a", add_special_tokens=False).ids
        whole = tokenizer.encode("a").ids
    except Exception:  # a vocabulary of characters without this one puts nothing anywhere
        return {"add_bos_token": False, "add_eos_token": False}
    added = len(whole) - len(plain)
    at = next((i for i in range(added + 1) if whole[i : i + len(plain)] == plain), 0)
    front, back = whole[:at], whole[at + len(plain) :]
    ids: dict[str, Any] = {}
    if len(front) == 1:
        ids["bos_token_id"] = front[0]
    if len(back) == 1 and not special.eos:
        ids["eos_token_id"] = back[0]
    if len(front) > 1 or len(back) > 1 or (back and special.eos and back[0] not in special.eos):
        notes.append(f"the tokenizer puts {front} in front of a text and {back} behind it; llama.cpp cannot do that.")
    return ids | {"add_bos_token": len(front) == 1, "add_eos_token": len(back) == 1}


def _pieces(content: dict[str, Any], tokens: list[str], types: list[int]) -> dict[str, Any]:
    """Return tokens, types and scores of a sentencepiece-like tokenizer. The score of a piece is minus its rank."""
    model = content["model"]
    normal = [kind == NORMAL for kind in types]
    tokens[:] = [token.replace(" ", SPACE) if is_text else token for token, is_text in zip(tokens, normal, strict=True)]
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(model.get("merges", [])):
        ranks.setdefault("".join(merge.split(" ") if isinstance(merge, str) else merge), rank)
    last = len(ranks)
    scores = [-float(ranks.get(token, last)) * is_text for token, is_text in zip(tokens, normal, strict=True)]
    ids: dict[str, Any] = {}
    for i, token in enumerate(tokens):
        if model.get("byte_fallback") and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            types[i] = BYTE
        elif token == model.get("unk_token"):
            types[i], ids["unknown_token_id"] = UNKNOWN, i
    return {"tokens": tokens, "token_type": types, "scores": scores} | ids


def read_vocabulary(metadata: Mapping[str, Any]) -> Any:
    """Return the `tokenizers.Tokenizer` of a GGUF file; None if the file has none."""
    own = {key.removeprefix(PREFIX): value for key, value in metadata.items() if key.startswith(PREFIX)}
    match own.get("model", "no_vocab"):
        case "no_vocab" | "none":
            return None
        case "gpt2":
            tokenizer = _read_bpe(own)
        case "llama":
            pieces = Pieces(
                own["tokens"],
                own.get("scores") or [0.0] * len(own["tokens"]),
                own.get("token_type") or [NORMAL] * len(own["tokens"]),
                prefix=own.get("add_space_prefix", True),
            )
            tokenizer = pieces.tokenizer()
        case kind:
            raise WeightsError(
                f"the file has a tokenizer of the kind {kind!r}, and only gpt2 and llama are read: give token ids, or "
                "the Hugging Face folder of this model."
            )
    front = own.get("add_bos_token", own["model"] == "llama")
    tokens = [
        own["tokens"][own[f"{name}_token_id"]] if wanted and f"{name}_token_id" in own else None
        for name, wanted in (("bos", front), ("eos", own.get("add_eos_token", False)))
    ]
    add_ends(tokenizer, tokens[0], tokens[1])
    return tokenizer


def _read_bpe(own: dict[str, Any]) -> Any:
    from tokenizers import AddedToken, Tokenizer

    split = by_name(own.get("pre", "default"))
    if split is None:
        raise WeightsError(
            f"the file has a tokenizer with the splitting rule {own.get('pre')!r}, which is not known: give token ids, "
            "or the Hugging Face folder of this model."
        )
    merges = [merge.split(" ", 1) for merge in own.get("merges", []) if merge != NO_MERGE]
    types = own.get("token_type") or [NORMAL] * len(own["tokens"])
    kept = {token: i for i, (token, kind) in enumerate(zip(own["tokens"], types, strict=True)) if kind != UNUSED}
    model = {"type": "BPE", "vocab": kept, "merges": merges, "ignore_merges": split.ignore_merges}
    level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    content = {"version": "1.0", "added_tokens": [], "model": model, "pre_tokenizer": split.steps(), "decoder": level}
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind == CONTROL)
            for token, kind in zip(own["tokens"], types, strict=True)
            if kind in (CONTROL, USER)
        ]
    )
    return tokenizer


def named_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the tokens that the metadata name, such as `bos_token`."""
    tokens = metadata.get(f"{PREFIX}tokens") or []
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    ids = {name: metadata.get(f"{PREFIX}{key}_token_id") for key, name in names.items()}
    return {name: tokens[i] for name, i in ids.items() if isinstance(i, int) and 0 <= i < len(tokens)}
