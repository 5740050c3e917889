"""One model twice, as transformers computes it and as we do, from the same weights; and ours with one change."""

import functools
import tempfile
from pathlib import Path

import torch
import transformers

from glassformer import config as c
from glassformer.model import build
from glassformer.weights import load
from tests.weights.tiny import random_model, saved

V = 97


@functools.cache
def _pair(family: str):
    if family == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=V, n_positions=48, n_embd=24, n_layer=2, n_head=3, n_inner=40, bos_token_id=1, eos_token_id=1
        )
        theirs = random_model(transformers.GPT2LMHeadModel, config)
    elif family == "llama":
        config = transformers.LlamaConfig(
            vocab_size=V, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
            intermediate_size=40, max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        theirs = random_model(transformers.LlamaForCausalLM, config)
    elif family == "bert":
        config = transformers.BertConfig(
            vocab_size=V, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40,
            max_position_embeddings=48,
        )  # fmt: skip
        theirs = random_model(transformers.BertForMaskedLM, config)
    else:
        config = transformers.T5Config(
            vocab_size=V,
            d_model=24,
            d_kv=8,
            d_ff=40,
            num_layers=2,
            num_heads=3,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
        theirs = random_model(transformers.T5ForConditionalGeneration, config)
    with tempfile.TemporaryDirectory() as folder:
        ours = load(saved(theirs, Path(folder)))
    return theirs, ours


def theirs(family: str):
    """A fresh copy of transformers' model."""
    import copy

    return copy.deepcopy(_pair(family)[0])


def ours(family: str, **changes):
    """Our model with the same weights; fields of the config change as in `config.replace`."""
    model = _pair(family)[1]
    made = build(c.replace(model.config, **changes), seed=3)
    own = made.state_dict()
    kept = {n: t for n, t in model.state_dict().items() if n in own and own[n].shape == t.shape}
    made.load_state_dict({**own, **kept})
    return made.eval()


def swap(model: torch.nn.Module, path: str, module: torch.nn.Module) -> None:
    """Put another module in a place."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


class FusedBlock(torch.nn.Module):
    """A GPT-2 block as nanoGPT writes it: one projection for q, k and v, torch's fused attention."""

    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        nn = torch.nn
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in self.qkv(self.ln1(x)).split(D, -1))
        heads = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(heads.transpose(1, 2).reshape(B, T, D))
        return x + self.down(torch.nn.functional.gelu(self.up(self.ln2(x)), approximate="tanh"))


class Nano(torch.nn.Module):
    """Our tiny GPT-2 refactored: fused, functional head, logits of the last place only unless there are targets."""

    def __init__(self, source):
        super().__init__()
        cfg = source.config
        self.wte = torch.nn.Embedding(cfg.vocab_size, cfg.d_model)
        self.wpe = torch.nn.Embedding(cfg.max_len, cfg.d_model)
        self.h = torch.nn.ModuleList(FusedBlock(cfg.d_model, cfg.n_heads, cfg.d_ff) for _ in range(cfg.n_layers))
        self.ln_f = torch.nn.LayerNorm(cfg.d_model)
        with torch.no_grad():
            self.wte.weight.copy_(source.embed.tokens.weight)
            self.wpe.weight.copy_(source.decoder.position.weight)
            self.ln_f.load_state_dict(source.decoder.norm.state_dict())
            for mine, block in zip(self.h, source.decoder.blocks, strict=True):
                a = block.attention
                mine.qkv.weight.copy_(torch.cat([a.q.weight, a.k.weight, a.v.weight]))
                mine.qkv.bias.copy_(torch.cat([a.q.bias, a.k.bias, a.v.bias]))
                pairs = {"o": a.o, "up": block.feedforward.up, "down": block.feedforward.down}
                for name, module in {**pairs, "ln1": block.norm_attention, "ln2": block.norm_feedforward}.items():
                    getattr(mine, name).load_state_dict(module.state_dict())

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        x = self.ln_f(x) if targets is not None else self.ln_f(x)[:, [-1]]
        logits = x @ self.wte.weight.T
        loss = None
        if targets is not None:
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss
