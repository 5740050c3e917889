"""An encoder-decoder by hand: `encode`, `decode` and a greedy `generate`; the padding id is known."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONFIG = {
    "vocab_size": 97,
    "d_model": 48,
    "n_heads": 4,
    "n_encoder_layers": 2,
    "n_decoder_layers": 2,
    "d_ff": 80,
    "max_len": 96,
    "activation": "relu",
    "bos_id": 2,
    "pad_id": 0,
}


class Attention(nn.Module):
    def __init__(self, d: int, heads: int, bug: str | None, cross: bool = False):
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(d, d)
        self.heads, self.bug, self.cross = heads, bug, cross

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (m.unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in self.kv(memory).chunk(2, -1))
        if self.bug == "cross_values_from_keys" and self.cross:
            v = k
        scores = q @ k.transpose(-1, -2) / (1 if self.bug == "no_cross_scale" and self.cross else q.shape[-1] ** 0.5)
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        if self.bug == "cross_softmax_axis" and self.cross:
            weights = scores.softmax(-2)
        else:
            weights = scores.softmax(-1)
        if self.bug == "cross_weights_squared" and self.cross:
            weights = weights.square()
        return self.o((weights @ v).transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    def __init__(self, c, bug: str | None, decoder: bool):
        super().__init__()
        d = c["d_model"]
        self.self_attention = Attention(d, c["n_heads"], bug)
        self.cross = Attention(d, c["n_heads"], bug, cross=True) if decoder else None
        self.feed = nn.Sequential(nn.Linear(d, c["d_ff"]), nn.ReLU(), nn.Linear(c["d_ff"], d))
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(3 if decoder else 2))

    def forward(
        self, x: Tensor, mask: Tensor | None, memory: Tensor | None = None, seen: Tensor | None = None
    ) -> Tensor:
        y = self.norms[0](x)
        x = x + self.self_attention(y, y, mask)
        if self.cross is not None:
            x = x + self.cross(self.norms[1](x), memory, seen)
        return x + self.feed(self.norms[-1](x))


class Translator(nn.Module):
    def __init__(self, c: dict, bug: str | None):
        super().__init__()
        self.config, self.bug = c, bug
        d = c["d_model"]
        self.src_embed, self.tgt_embed = nn.Embedding(c["vocab_size"], d), nn.Embedding(c["vocab_size"], d)
        self.pos = nn.Parameter(torch.randn(c["max_len"], d) * 0.02)
        self.encoder = nn.ModuleList(Layer(c, bug, False) for _ in range(c["n_encoder_layers"]))
        self.decoder = nn.ModuleList(Layer(c, bug, True) for _ in range(c["n_decoder_layers"]))
        if bug == "decoder_layers_shared":
            self.decoder[1].cross = self.decoder[0].cross
        self.norm, self.memory_norm = nn.LayerNorm(d), nn.LayerNorm(d)
        self.generator = nn.Linear(d, c["vocab_size"], bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)
        self.kept: Tensor | None = None

    def encode(self, src: Tensor, src_mask: Tensor | None = None) -> Tensor:
        mask = None if src_mask is None else src_mask.bool()[:, None, None]
        if self.bug == "encoder_causal":
            mask = torch.ones(src.shape[1], src.shape[1], dtype=torch.bool).tril()[None, None] & (
                True if mask is None else mask
            )
        if self.bug == "encoder_ignores_mask":
            mask = None
        x = self.src_embed(src) + (0 if self.bug == "source_without_positions" else self.pos[: src.shape[1]])
        for layer in self.encoder:
            x = layer(x, mask)
        return self.memory_norm(x)

    def decode(self, tgt: Tensor, memory: Tensor, src_mask: Tensor | None, tgt_mask: Tensor | None = None) -> Tensor:
        t = tgt.shape[1]
        mask = torch.ones(t, t, dtype=torch.bool, device=tgt.device).tril()[None, None]
        if self.bug == "decoder_not_causal":
            mask = torch.ones_like(mask)
        if tgt_mask is not None:
            mask = mask & (tgt_mask.bool()[:, None, None] | torch.eye(t, dtype=torch.bool, device=tgt.device))
        seen = None if src_mask is None or self.bug == "cross_ignores_mask" else src_mask.bool()[:, None, None]
        x = self.tgt_embed(tgt) + self.pos[:t]
        for layer in self.decoder:
            x = layer(x, mask, memory, seen)
        return self.generator(self.norm(x))

    def forward(
        self, src: Tensor, tgt: Tensor, src_mask: Tensor | None = None, tgt_mask: Tensor | None = None
    ) -> Tensor:
        if self.bug == "memory_kept":
            if self.kept is None or self.kept.shape[:2] != src.shape:
                self.kept = self.encode(src, src_mask)
            return self.decode(tgt, self.kept, src_mask, tgt_mask)
        return self.decode(tgt, self.encode(src, src_mask), src_mask, tgt_mask)

    def loss(self, src: Tensor, tgt: Tensor, src_mask: Tensor | None = None, tgt_mask: Tensor | None = None) -> Tensor:
        logits, labels = self(src, tgt, src_mask, tgt_mask), tgt
        if tgt_mask is not None and self.bug != "padding_counted":
            labels = labels.masked_fill(~tgt_mask.bool(), -100)
        if self.bug == "not_shifted":
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    @torch.no_grad()
    def generate(self, src: Tensor, n: int, src_mask: Tensor | None = None) -> Tensor:
        memory = self.encode(src, src_mask)
        out = torch.full((len(src), 1), self.config["bos_id"], dtype=torch.long, device=src.device)
        for _ in range(n):
            logits = self.decode(out, memory, None if self.bug == "generate_drops_mask" else src_mask)
            last = logits[:, -2 if self.bug == "position_before" and out.shape[1] > 1 else -1]
            pick = last.topk(2, -1).indices[:, 1] if self.bug == "second_best" else last.argmax(-1)
            out = torch.cat([out, pick[:, None]], 1)
        return out


def build(bug: str | None = None, **changes: object) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Translator({**CONFIG, **changes}, bug).eval()


BUGS = {
    "cross_values_from_keys": "dead_gradient",
    "no_cross_scale": "attn_scale",
    "cross_softmax_axis": "softmax_axis",
    "cross_weights_squared": "attention_weights",
    "decoder_layers_shared": "layer_reuse",
    "encoder_causal": "over_mask",
    "encoder_ignores_mask": "pad_leak",
    "source_without_positions": "position_missing",
    "decoder_not_causal": "causal_leak",
    "cross_ignores_mask": "pad_leak",
    "memory_kept": "state_leak",
    "padding_counted": "loss_padding",
    "not_shifted": "label_shift",
    "generate_drops_mask": "pad_leak",
    "position_before": "decode_select",
    "second_best": "decode_select",
}
