"""The encoder-decoder of torch's own layers: `model(src, tgt, src_mask)`, pre-norm, one shared table."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONFIG = {
    "vocab_size": 97,
    "d_model": 48,
    "n_layers": 2,
    "n_heads": 4,
    "max_len": 128,
    "init_std": 0.02,
    "pre_norm": True,
    "tie_weights": True,
    "share_embeddings": True,
    "pad_id": 0,
    "position": "learned",
}


class Pair(nn.Module):
    def __init__(self, config, bug: str | None = None):
        super().__init__()
        self.config, self.bug = config, bug
        d, n = config.d_model, config.n_heads
        self.source_tokens, self.target_tokens = nn.Embedding(config.vocab_size, d), nn.Embedding(config.vocab_size, d)
        self.table = nn.Embedding(config.max_len, d)
        given = {"dim_feedforward": 80, "dropout": 0.0, "activation": "gelu", "batch_first": True}
        norm_first = bug != "post_norm"
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(d, n, norm_first=norm_first, **given),
            config.n_layers,
            nn.LayerNorm(d),
            enable_nested_tensor=False,
        )
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(d, n, norm_first=norm_first, **given), config.n_layers, nn.LayerNorm(d)
        )
        self.head = nn.Linear(d, config.vocab_size, bias=False)
        for name, p in self.named_parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=config.init_std)
            elif "bias" in name:
                nn.init.zeros_(p)
        if bug not in ("tables_separate", "all_separate"):
            self.source_tokens.weight = self.target_tokens.weight
        if bug == "tables_copied":
            self.source_tokens.weight = nn.Parameter(self.target_tokens.weight.detach().clone())
        if bug not in ("head_separate", "all_separate"):
            self.head.weight = self.target_tokens.weight
        if bug == "head_tied_to_source":
            self.source_tokens.weight = nn.Parameter(torch.randn(config.vocab_size, d) * config.init_std)
            self.head.weight = self.source_tokens.weight
        if bug == "layers_multiplied":
            self.encoder.layers = nn.ModuleList([self.encoder.layers[0]] * config.n_layers)

    def place(self, x: Tensor) -> Tensor:
        pos = self.table(torch.arange(x.shape[1], device=x.device))
        x = x + pos
        return x + pos if self.bug == "position_twice" else x

    def forward(self, src: Tensor, tgt: Tensor, src_mask: Tensor | None = None) -> Tensor:
        hidden = None if src_mask is None else ~src_mask.bool()
        memory = self.encoder(self.place(self.source_tokens(src)), src_key_padding_mask=hidden)
        causal = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool, device=tgt.device).triu(1)
        out = self.decoder(self.place(self.target_tokens(tgt)), memory, causal, memory_key_padding_mask=hidden)
        if self.bug == "layer_twice":
            out = self.decoder.layers[1](out, memory, causal, memory_key_padding_mask=hidden)
        return self.head(out)

    def loss(self, src: Tensor, tgt: Tensor, src_mask: Tensor | None = None, tgt_mask: Tensor | None = None) -> Tensor:
        logits, labels = self(src, tgt, src_mask)[:, :-1], tgt[:, 1:]
        if tgt_mask is not None:
            labels = labels.masked_fill(~tgt_mask[:, 1:].bool(), -100)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build(bug: str | None = None, **changes: object) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Pair(SimpleNamespace(**{**CONFIG, **changes}), bug).eval()


BUGS = {
    "tables_separate": "weight_tying",
    "tables_copied": "weight_tying",
    "head_separate": "weight_tying",
    "all_separate": "weight_tying",
    "head_tied_to_source": "weight_tying",
    "layers_multiplied": "layer_reuse",
    "layer_twice": "layer_reuse",
    "position_twice": "position_twice",
    "post_norm": "norm_placement",
}
