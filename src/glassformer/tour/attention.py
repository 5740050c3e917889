"""The attention patterns of the trained model on one line of text."""

from dataclasses import dataclass

import numpy as np
import torch

from glassformer.lens import trace
from glassformer.model import Model
from glassformer.training import Session


@dataclass(frozen=True)
class AttentionMaps:
    """The attention pattern of every head of a model on one text."""

    tokens: list[str]
    patterns: list[list[list[list[float]]]]
    """Layer, head, query, key; the weights of each query sum to 1."""
    previous: list[list[float]]
    """Layer, head: mean weight on the previous token."""
    sharpest: tuple[int, int]
    """Layer and head of the lowest mean entropy."""


def attention_maps(model: Model, session: Session, length: int = 32) -> AttentionMaps:
    """Return the patterns of all heads on the first line of the validation split that is long enough."""
    tokenizer = session.data.tokenizer
    text = tokenizer.decode(np.asarray(session.data.val[:4000]).tolist())
    lines = [line for line in text.split("\n") if len(line) >= length] or [text]
    ids = tokenizer.encode(lines[0]).tolist()[: min(length, model.config.max_len or length)]
    site = "blocks.*.attention.pattern"
    patterns = trace(model, torch.tensor([ids], device=model.device), sites=site).stack(site)[:, 0].float().cpu()
    previous = patterns.diagonal(-1, 2, 3).mean(-1)
    entropy = torch.special.entr(patterns).sum(-1).mean(-1)
    layer, head = divmod(int(entropy.argmin()), entropy.shape[1])
    tokens = [tokenizer.decode([i]) for i in ids]
    return AttentionMaps(tokens, patterns.tolist(), previous.tolist(), (layer, head))
