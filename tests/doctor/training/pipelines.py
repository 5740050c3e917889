"""Tiny training pipelines: a sound one, and the faults that are planted in it."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

V, PAD, EOS = 37, 0, 1


class Tiny(nn.Module):
    """A decoder in plain torch: one layer, learned positions, a mask argument, optional labels that it shifts."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.tokens, self.places = nn.Embedding(V, 16), nn.Embedding(32, 16)
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(16, V)
        self.config = SimpleNamespace(vocab_size=V, pad_token_id=PAD, eos_token_id=EOS)

    def forward(self, input_ids, attention_mask=None, labels=None, position_ids=None, document_ids=None):
        T = input_ids.shape[1]
        index = torch.arange(T)
        x = self.tokens(input_ids) + self.places(index if position_ids is None else position_ids)
        q, k, v = self.qkv(self.norm(x)).split(16, -1)
        seen = (index[:, None] >= index)[None].expand(len(input_ids), -1, -1)
        if attention_mask is not None:
            seen = seen & (attention_mask[:, None].bool() | torch.eye(T, dtype=torch.bool))
        if document_ids is not None:
            seen = seen & (document_ids[:, None] == document_ids[:, :, None])
        x = x + self.drop(self.out(F.scaled_dot_product_attention(q, k, v, seen)))
        logits = self.head(x)
        if labels is None:
            return logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return SimpleNamespace(logits=logits, loss=loss)


def texts(lengths=(12, 9, 7, 5), seed=0):
    """Sequences of random tokens that end with EOS, padded on the right: ids, mask, labels."""
    draw = torch.Generator().manual_seed(seed)
    width = max(lengths) + 1
    ids = torch.full((len(lengths), width), PAD)
    for row, n in enumerate(lengths):
        ids[row, :n] = torch.randint(2, V, (n,), generator=draw)
        ids[row, n] = EOS
    mask = (torch.arange(width) <= torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, -100)}


class Plain:
    """A pipeline. `faults` changes parts of it; without any it is sound."""

    def __init__(self, parts=1, dropout=0.0, lr=1e-2, **faults):
        torch.manual_seed(0)
        self.model, self.parts, self.faults = Tiny(dropout).train(), parts, faults
        trained = list(self.model.parameters())
        if faults.get("leave_out"):
            trained = [p for n, p in self.model.named_parameters() if not n.startswith("head")]
        self.optimizer = torch.optim.AdamW(trained, lr=lr)
        if faults.get("rebuilt"):
            self.model.head = nn.Linear(16, V)
        if faults.get("frozen"):
            self.model.qkv.requires_grad_(False)
        if faults.get("eval"):
            self.model.eval()

    def __call__(self, batch):
        if not self.faults.get("no_zero"):
            self.optimizer.zero_grad()
        n = len(batch["input_ids"]) // self.parts
        count = (batch["labels"][:, 1:] != -100).sum()
        for i in range(self.parts):
            part = {k: v[i * n : (i + 1) * n] for k, v in batch.items()}
            self.loss(part, count).backward()
        if self.faults.get("clip"):
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)
        if not self.faults.get("no_step"):
            self.optimizer.step()

    def loss(self, part, count):
        labels = part.pop("labels")
        logits = self.model(**part)
        shift = self.faults.get("shift", 1)
        if self.faults.get("count_padding"):
            labels = part["input_ids"]
        if self.faults.get("mask_end"):
            labels = torch.where(labels == EOS, -100, labels)
        if self.faults.get("detached"):
            return logits.detach().mean().requires_grad_()
        size = logits.shape[1]
        a, b = logits[:, max(0, -shift) : size - max(0, shift)], labels[:, max(0, shift) : size - max(0, -shift)]
        total = F.cross_entropy(a.flatten(0, 1), b.flatten(), ignore_index=-100, reduction="sum")
        match self.faults.get("divide"):
            case "each part by itself":
                return total / (b != -100).sum() / self.parts
            case "not by the parts":
                return total / (b != -100).sum()
            case "all positions":
                return total / logits[..., 0].numel() / self.parts
            case _:
                return total / count * self.faults.get("scale", 1.0)
