"""Checkouts of peers in miniature: the same interface, a model in a few lines."""

from pathlib import Path

NANOGPT = """
import math
from dataclasses import dataclass
import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class GPTConfig:
    block_size: int = 8
    vocab_size: int = 8
    n_layer: int = 1
    n_head: int = 1
    n_embd: int = 8
    dropout: float = 0.0
    bias: bool = True


class Norm(nn.Module):
    def __init__(self, width, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = c.n_head
        self.c_attn = nn.Linear(c.n_embd, 3 * c.n_embd, bias=c.bias)
        self.c_proj = nn.Linear(c.n_embd, c.n_embd, bias=c.bias)

    def forward(self, x):
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in self.c_attn(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        past = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        mixed = scores.masked_fill(~past, -torch.inf).softmax(-1) @ v
        return self.c_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c_fc = nn.Linear(c.n_embd, 4 * c.n_embd, bias=c.bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * c.n_embd, c.n_embd, bias=c.bias)

    def forward(self, x):
        return self.c_proj(self.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1, self.ln_2 = Norm(c.n_embd, c.bias), Norm(c.n_embd, c.bias)
        self.attn, self.mlp = Attention(c), MLP(c)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        print("number of parameters: not on the channel of the answers")
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(c.vocab_size, c.n_embd), wpe=nn.Embedding(c.block_size, c.n_embd),
            h=nn.ModuleList(Block(c) for _ in range(c.n_layer)), ln_f=Norm(c.n_embd, c.bias)))
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, ids, targets=None):
        t = self.transformer
        x = t.wte(ids) + t.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in t.h:
            x = block(x)
        logits = self.lm_head(t.ln_f(x))
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, ids, new, top_k):
        assert (new, top_k) == (1, 1)
        return torch.cat([ids, self(ids)[0][:, -1:].argmax(-1)], 1)

    def configure_optimizers(self, decay, lr, betas, device):
        kinds = [[p for p in self.parameters() if (p.dim() >= 2) == matrix] for matrix in (True, False)]
        groups = [{"params": kinds[0], "weight_decay": decay}, {"params": kinds[1], "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=lr, betas=betas)
"""

GPT_FAST_MODEL = """
from dataclasses import dataclass
import torch


@dataclass
class ModelArgs:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_local_heads: int
    dim: int
    intermediate_size: int


class Transformer(torch.nn.Module):
    def __init__(self, args):
        super().__init__()
        self.args = args
        self.caches = None
        self.output = torch.nn.Linear(args.dim, args.vocab_size, bias=False)

    def setup_caches(self, max_batch_size, max_seq_length):
        self.caches = (max_batch_size, max_seq_length)
"""

GPT_FAST_GENERATE = """
import torch
from model import Transformer
from tokenizer import get_tokenizer


def decode_one_token(model, x): ...
def prefill(model, x, places, temperature, top_k): ...


def generate(model, prompt, new, batch_size, *, interactive, draft_model, callback, temperature, top_k):
    made = torch.zeros(batch_size, len(prompt) + new, dtype=torch.int)
    for step in range(new - 1):
        made[:, len(prompt) + 1 + step] = step
        callback(step)
    return made, {}
"""


def nanogpt(folder: Path) -> Path:
    (folder / "model.py").write_text(NANOGPT)
    (folder / "train.py").touch()
    return folder


def gpt_fast(folder: Path) -> Path:
    (folder / "model.py").write_text(GPT_FAST_MODEL)
    (folder / "generate.py").write_text(GPT_FAST_GENERATE)
    return folder
