"""fairseq's style: (T,B,D) inside, heads folded into the batch, scaled queries, sinusoids, a growing state."""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONFIG = {
    "vocab_size": 97,
    "embed_dim": 48,
    "layers": 3,
    "attention_heads": 4,
    "ffn_dim": 80,
    "max_positions": 160,
    "activation_fn": "relu",
    "normalize_before": True,
    "share_decoder_input_output_embed": True,
    "padding_idx": 1,
}


class SelfAttention(nn.Module):
    def __init__(self, dim: int, heads: int, bug: str | None):
        super().__init__()
        self.heads, self.width, self.bug = heads, dim // heads, bug
        self.q_proj, self.k_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.v_proj, self.out_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def split(self, x: Tensor, steps: int, batch: int) -> Tensor:
        if self.bug == "split_batch_first":
            return x.reshape(batch * self.heads, steps, self.width)
        return x.contiguous().view(steps, batch * self.heads, self.width).transpose(0, 1)

    def forward(self, x: Tensor, hidden: Tensor | None, state: dict | None) -> Tensor:
        steps, batch, dim = x.shape
        scale = {"no_scale": 1.0, "scale_by_model_width": dim**-0.5}.get(self.bug, self.width**-0.5)
        q = self.split(self.q_proj(x) * scale, steps, batch)
        k = self.split(self.k_proj(x), steps, batch)
        v = self.split((self.k_proj if self.bug == "values_from_keys" else self.v_proj)(x), steps, batch)
        if state is not None:
            if "k" in state:
                k = torch.cat([state["k"], k], 1)
                v = torch.cat([state["v"], v], 1)
            if not (self.bug == "state_keeps_prompt" and "k" in state):
                state["k"], state["v"] = k, v
        source = k.shape[1]
        scores = torch.bmm(q, k.transpose(1, 2))
        later = torch.ones(steps, source, dtype=torch.bool).triu(1 if self.bug == "square_mask" else source - steps + 1)
        least = -1e4 if self.bug == "weak_mask" else float("-inf")
        if self.bug != "not_causal":
            scores = scores.masked_fill(later, least)
        if hidden is not None and self.bug != "padding_seen":
            scores = scores.view(batch, self.heads, steps, source)
            scores = scores.masked_fill(hidden[:, None, None], torch.finfo(scores.dtype).min)
            scores = scores.view(batch * self.heads, steps, source)
        if self.bug == "half_softmax":
            weights = F.softmax(scores.half(), dim=-1).type_as(scores)
        else:
            weights = F.softmax(scores, dim=1 if self.bug == "softmax_over_queries" else -1)
        if self.bug == "softmax_twice":
            weights = F.softmax(weights.masked_fill(later, float("-inf")), dim=-1)
        if self.bug == "weights_squared":
            weights = weights**2
        out = torch.bmm(weights, v)
        if self.bug == "merged_untransposed":
            out = out.contiguous().view(steps, batch, dim)
        else:
            out = out.transpose(0, 1).contiguous().view(steps, batch, dim)
        return self.out_proj(out)


class Layer(nn.Module):
    def __init__(self, config, bug: str | None):
        super().__init__()
        dim = config.embed_dim
        self.self_attn = SelfAttention(dim, config.attention_heads, bug)
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.fc1, self.fc2, self.bug = nn.Linear(dim, config.ffn_dim), nn.Linear(config.ffn_dim, dim), bug

    def forward(self, x: Tensor, hidden: Tensor | None, state: dict | None) -> Tensor:
        residual = x
        x = self.self_attn_layer_norm(x)
        if self.bug == "residual_normed":
            residual = x
        x = residual + self.self_attn(x, hidden, state)
        residual = x
        x = self.final_layer_norm(x)
        x = self.fc2((F.gelu if self.bug == "gelu" else F.relu)(self.fc1(x)))
        return x if self.bug == "residual_dropped" else residual + x


def sinusoids(count: int, dim: int) -> Tensor:
    half = dim // 2
    rates = torch.exp(torch.arange(half, dtype=torch.float) * -(math.log(10000) / (half - 1)))
    angles = torch.arange(count, dtype=torch.float)[:, None] * rates[None]
    return torch.cat([torch.sin(angles), torch.cos(angles)], dim=1)


class Decoder(nn.Module):
    """`model(tokens, attention_mask, cache)`: with a cache, the mask is that of everything so far."""

    def __init__(self, config, bug: str | None):
        super().__init__()
        self.config, self.bug = config, bug
        self.embed_tokens = nn.Embedding(config.vocab_size, config.embed_dim, padding_idx=config.padding_idx)
        nn.init.normal_(self.embed_tokens.weight, std=config.embed_dim**-0.5)
        self.layers = nn.ModuleList(Layer(config, bug) for _ in range(config.layers))
        if bug == "layers_multiplied":
            self.layers = nn.ModuleList([self.layers[0]] * config.layers)
        self.layer_norm = nn.LayerNorm(config.embed_dim)
        self.output_projection = nn.Linear(config.embed_dim, config.vocab_size, bias=False)
        if bug == "untied":
            nn.init.normal_(self.output_projection.weight, std=config.embed_dim**-0.5)
        else:
            self.output_projection.weight = self.embed_tokens.weight
        self.register_buffer("table", sinusoids(config.max_positions, config.embed_dim), persistent=False)

    def new_cache(self) -> list[dict]:
        return [{} for _ in self.layers]

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None, cache: list[dict] | None = None):
        past = cache[0]["k"].shape[1] if cache and "k" in cache[0] else 0
        start = 0 if self.bug == "position_restarts" else past
        index = torch.arange(start, start + tokens.shape[1], device=tokens.device).expand_as(tokens)
        if attention_mask is not None and self.bug != "position_restarts":
            index = (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        place = self.table[index]
        x = math.sqrt(self.config.embed_dim) * self.embed_tokens(tokens)
        if self.bug != "positions_forgotten":
            x = x + place
        if self.bug == "position_twice":
            x = x + place
        x = x.transpose(0, 1)
        hidden = None if attention_mask is None else ~attention_mask.bool()
        for i, layer in enumerate(self.layers):
            x = layer(x, hidden, None if cache is None else cache[i])
            if self.bug == "layer_twice" and i == 1 and cache is None:
                x = layer(x, hidden, None)
        logits = self.output_projection(self.layer_norm(x).transpose(0, 1))
        return logits if cache is None else (logits, cache)

    def loss(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        logits = self(tokens, attention_mask)
        shift = 2 if self.bug == "shifted_twice" else 1
        targets = tokens[:, shift:]
        if attention_mask is not None:
            targets = targets.masked_fill(attention_mask[:, shift:] == 0, -100)
        return F.cross_entropy(logits[:, :-shift].reshape(-1, logits.shape[-1]), targets.reshape(-1))


def build(bug: str | None = None, **changes: object) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Decoder(SimpleNamespace(**{**CONFIG, **changes}), bug).eval()


BUGS = {
    "split_batch_first": "head_layout",
    "merged_untransposed": "head_layout",
    "no_scale": "attn_scale",
    "scale_by_model_width": "attn_scale",
    "values_from_keys": "dead_gradient",
    "state_keeps_prompt": "cache_mismatch",
    "square_mask": "cache_mask",
    "weak_mask": "mask_value",
    "not_causal": "causal_leak",
    "padding_seen": "pad_leak",
    "half_softmax": "low_precision",
    "softmax_over_queries": "softmax_axis",
    "softmax_twice": "attention_weights",
    "weights_squared": "attention_weights",
    "residual_normed": "norm_placement",
    "gelu": "activation",
    "residual_dropped": "norm_placement",
    "layers_multiplied": "layer_reuse",
    "layer_twice": "layer_reuse",
    "untied": "weight_tying",
    "position_restarts": "decode_position",
    "positions_forgotten": "position_missing",
    "position_twice": "position_twice",
    "shifted_twice": "label_shift",
}
