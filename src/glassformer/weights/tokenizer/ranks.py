"""Read a tiktoken file: a line for each token, its bytes in base64 and its rank."""

import base64
import binascii
from pathlib import Path
from typing import Any

from glassformer.weights.errors import WeightsError
from glassformer.weights.tensors import AGAIN
from glassformer.weights.tokenizer.splits import CL100K, GPT2, GPT4O, LLAMA3, QWEN2, Split, byte_signs

SUFFIX = ".tiktoken"
# The file does not have the splitting rule. It is known for these names, and for the tokenizer.model of Llama 3.
RULES = {
    "gpt2": GPT2,
    "r50k_base": GPT2,
    "p50k_base": GPT2,
    "cl100k_base": CL100K,
    "o200k_base": GPT4O,
    "qwen": QWEN2,
    "tokenizer": LLAMA3,
}


def is_ranks(file: Path) -> bool:
    """Return True if the first line of a file is base64, a space and a number."""
    try:
        with file.open("rb") as opened:
            token, _, rank = opened.readline(1024).strip().partition(b" ")
        return rank.isdigit() and bool(base64.b64decode(token, validate=True))
    except (OSError, binascii.Error):
        return False


def read_ranks(file: Path) -> Any:
    """Return the `tokenizers.Tokenizer` of a tiktoken file. It has no special tokens: other files list them."""
    from tokenizers import Tokenizer, decoders, models

    if file.stem not in RULES:
        raise WeightsError(
            f"{file} is a tiktoken file, whose splitting rule is known for the names {', '.join(RULES)} only: rename "
            "it to the one that it is, or use a tokenizer.json."
        )
    ranks = _read(file)
    signs = byte_signs()
    vocabulary = {"".join(signs[byte] for byte in token): rank for token, rank in ranks.items()}
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = _split(ranks, token, rank) if len(token) > 1 else []
        if len(parts) == 2:
            merges.append(("".join(signs[b] for b in parts[0]), "".join(signs[b] for b in parts[1])))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = _steps(Split((), RULES[file.stem]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _read(file: Path) -> dict[bytes, int]:
    try:
        pairs = [line.split() for line in file.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (OSError, ValueError) as error:
        raise WeightsError(f"{file} is not a tiktoken file ({error}): {AGAIN}.") from None
    lacking = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if lacking:
        raise WeightsError(f"{file} lacks {len(lacking)} of the 256 bytes, the smallest {lacking[0]}: {AGAIN}.")
    return ranks


def _split(ranks: dict[bytes, int], token: bytes, limit: int) -> list[bytes]:
    """Return the parts of which the last merge makes `token`: merges with a rank below `limit`, lowest first."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        found = [(ranks.get(parts[i] + parts[i + 1], limit), i) for i in range(len(parts) - 1)]
        rank, i = min(found)
        if rank >= limit:
            break
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def _steps(split: Split) -> Any:
    import json

    from tokenizers import Tokenizer

    steps = {"version": "1.0", "pre_tokenizer": split.steps(), "model": {"type": "BPE", "vocab": {}, "merges": []}}
    return Tokenizer.from_str(json.dumps(steps)).pre_tokenizer
