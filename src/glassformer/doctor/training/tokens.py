"""Ids: the tokenizer and the model agree on them, and packed documents do not read one another."""

from typing import Any

import torch
from torch import Tensor

from glassformer.doctor.subject import interface as calls
from glassformer.doctor.subject.errors import Unsupported
from glassformer.doctor.subject.measure import same_shape_bound
from glassformer.doctor.training.listen import Forward, Update
from glassformer.doctor.training.pipeline import Pipeline
from glassformer.finding import Finding, Verdict

DOCUMENTS = ("document_ids", "doc_ids", "documents", "segment_ids", "sequence_ids", "seq_idx")
"""Arguments with the number of the document of each token."""
SPECIAL = ("pad", "eos", "bos")


def special_ids(pipeline: Pipeline) -> dict[str, int | None]:
    """Return the ids of padding, beginning and end: the tokenizer's, else the model's config's."""
    config = getattr(pipeline.model, "config", None)
    found: dict[str, int | None] = {}
    for name in SPECIAL:
        values = [getattr(holder, f"{name}_token_id", None) for holder in (pipeline.tokenizer, config)]
        found[name] = next((v for v in values if isinstance(v, int) and v >= 0), None)
    return found


def tokenizer_fits(pipeline: Pipeline, update: Update) -> list[Finding]:
    """The model has a row for each id of the tokenizer, and both name the same special ids."""
    id, tokenizer = "tokenizer_mismatch/size", pipeline.tokenizer
    if tokenizer is None:
        return [Finding.skip(id, "no tokenizer was found: give tokenizer=")]
    size, rows = _size(tokenizer), _rows(update)
    if size is None or rows is None:
        return [Finding.skip(id, "the sizes of the tokenizer and of the model's vocabulary are not known")]
    why = "ids of the tokenizer, at most as many as the model has rows"
    remedy = "Resize the embedding and the head to the tokenizer, or use the tokenizer that the model was trained with."
    found = [Finding.judge(id, size, rows, why, remedy)]
    config = getattr(pipeline.model, "config", None)
    for name in SPECIAL:
        mine, theirs = (getattr(h, f"{name}_token_id", None) for h in (tokenizer, config))
        if isinstance(mine, int) and isinstance(theirs, int) and not isinstance(theirs, bool):
            why = f"{name}_token_id is {mine} in the tokenizer and {theirs} in the model's config"
            verdict = Verdict.PASS if mine == theirs else Verdict.FAIL
            remedy = "Set the id of the config to the tokenizer's."
            found.append(Finding(f"tokenizer_mismatch/{name}", verdict, mine, theirs, why, remedy))
    return found


def _size(tokenizer: Any) -> int | None:
    method = getattr(tokenizer, "get_vocab_size", None)
    if callable(method):
        return int(method())
    return len(tokenizer) if hasattr(tokenizer, "__len__") else getattr(tokenizer, "vocab_size", None)


def _rows(update: Update) -> int | None:
    return next((f.logits.shape[-1] for f in update.forwards if f.logits is not None), None)


def packed(pipeline: Pipeline, update: Update) -> Finding:
    """Where a batch declares several documents in one sequence, a document does not read an earlier one."""
    id = "packing_leak/documents"
    for forward in update.forwards:
        documents = _documents(forward)
        if documents is not None:
            return _leak(id, pipeline, forward, documents)
    return Finding.skip(id, "no sequence declares several documents (document ids, or positions that begin again)")


def _documents(forward: Forward) -> Tensor | None:
    """The number of the document of each token, where there are several in a sequence."""
    named = {n: v for n, v in forward.given[1].items() if isinstance(v, Tensor) and v.shape == forward.tokens.shape}
    ids = next((named[n] for n in DOCUMENTS if n in named), None)
    if ids is None:
        positions = next((named[n] for n in calls.POSITIONS if n in named), None)
        if positions is None:
            return None
        begins = torch.zeros_like(positions)
        begins[:, 1:] = (positions[:, 1:] == 0) & (positions[:, :-1] > 0)
        ids = begins.cumsum(1)
    return ids if bool((ids != ids[:, :1]).any()) else None


def _leak(id: str, pipeline: Pipeline, forward: Forward, documents: Tensor) -> Finding:
    assert forward.logits is not None
    later = documents != documents[:, :1]
    size = forward.logits.shape[-1]
    changed = torch.where(later, forward.tokens, (forward.tokens + 1) % size)
    args, kwargs = forward.given
    # labels are left out: the loss is not asked for
    kwargs = {n: v for n, v in kwargs.items() if n not in calls.LABELS}

    def ask(tokens: Tensor) -> Tensor:
        swap = [tokens if v is forward.tokens or _same(v, forward.tokens) else v for v in args]
        named = {n: tokens if _same(v, forward.tokens) and n not in calls.POSITIONS else v for n, v in kwargs.items()}
        output = pipeline.model(*swap, **named)
        return calls.find_logits(output, (tokens.shape[0], tokens.shape[1]), size)

    pipeline.model.eval()
    with torch.no_grad():
        one, two = ask(forward.tokens), ask(changed)
    if torch.equal(one, two):
        raise Unsupported("the model's logits do not depend on its tokens")
    moved = float((one - two)[later].abs().max())
    why = "how far logits of a later document move when the first one changes"
    remedy = "Pass a mask of blocks (document i sees document i only), not only positions that begin again."
    return Finding.judge(id, moved, same_shape_bound(one), why, remedy)


def _same(value: Any, tokens: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == tokens.shape and bool((value == tokens).all())
