"""Hugging Face's style: `model(input_ids, attention_mask, position_ids, past_key_values, use_cache, labels)`, Llama."""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONFIG = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "norm_first": True,
    "scale_residual_init": True,
}


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos[:, None] + rotate_half(x) * sin[:, None]


class Cache:
    """Keys and values by layer."""

    def __init__(self):
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        if layer in self.layers:
            k, v = (torch.cat(pair, 2) for pair in zip(self.layers[layer], (k, v), strict=True))
        self.layers[layer] = (k, v)
        return k, v

    def get_seq_length(self) -> int:
        return self.layers[0][0].shape[2] if self.layers else 0

    def crop(self, n: int) -> None:
        self.layers = {i: (k[:, :, :n], v[:, :, :n]) for i, (k, v) in self.layers.items()}

    def reorder_cache(self, rows: Tensor) -> None:
        self.layers = {i: (k[rows], v[rows]) for i, (k, v) in self.layers.items()}


class SelfAttention(nn.Module):
    def __init__(self, config, layer_idx: int, bug: str | None):
        super().__init__()
        self.config, self.layer_idx, self.bug = config, layer_idx, bug
        d, self.width = config.hidden_size, config.hidden_size // config.num_attention_heads
        self.q_proj = nn.Linear(d, d, bias=False)
        self.k_proj = nn.Linear(d, config.num_key_value_heads * self.width, bias=False)
        self.v_proj = nn.Linear(d, config.num_key_value_heads * self.width, bias=False)
        self.o_proj = nn.Linear(d, d, bias=False)

    def forward(self, x: Tensor, mask: Tensor, rope: tuple[Tensor, Tensor], cache: Cache | None) -> Tensor:
        shape = (*x.shape[:-1], -1, self.width)
        q, k = self.q_proj(x).view(shape).transpose(1, 2), self.k_proj(x).view(shape).transpose(1, 2)
        source = self.k_proj if self.bug == "values_from_keys" else self.v_proj
        v = source(x).view(shape).transpose(1, 2)
        q, k = turned(q, *rope), turned(k, *rope)
        if self.bug == "rotated_twice":
            q, k = turned(q, *rope), turned(k, *rope)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        k, v = (t.repeat_interleave(self.config.num_attention_heads // t.shape[1], dim=1) for t in (k, v))
        scores = torch.matmul(q, k.transpose(2, 3)) * self.width**-0.5 + mask
        if self.bug == "half_softmax":
            weights = F.softmax(scores, dim=-1, dtype=torch.float16).to(q.dtype)
        else:
            weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        if self.bug == "softmax_twice":
            weights = F.softmax(weights, dim=-1)
        if self.bug == "softmax_twice_masked":
            weights = F.softmax(weights + mask, dim=-1)
        if self.bug == "weights_squared":
            weights = weights**2
        return self.o_proj(torch.matmul(weights, v).transpose(1, 2).reshape(x.shape))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        d, f = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj = nn.Linear(d, f, bias=False), nn.Linear(d, f, bias=False)
        self.down_proj = nn.Linear(f, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config, layer_idx: int, bug: str | None):
        super().__init__()
        self.self_attn, self.mlp, self.bug = SelfAttention(config, layer_idx, bug), MLP(config), bug
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, mask: Tensor, rope: tuple[Tensor, Tensor], cache: Cache | None) -> Tensor:
        x = hidden_states
        if self.bug == "post_norm":
            x = self.input_layernorm(x + self.self_attn(x, mask, rope, cache))
            return self.post_attention_layernorm(x + self.mlp(x))
        x = x + self.self_attn(self.input_layernorm(x), mask, rope, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class CausalLM(nn.Module):
    def __init__(self, config, bug: str | None = None):
        super().__init__()
        self.config, self.bug = config, bug
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.layers = nn.ModuleList(DecoderLayer(config, i, bug) for i in range(config.num_hidden_layers))
        if bug == "attention_shared":
            self.layers[2].self_attn.q_proj = self.layers[0].self_attn.q_proj
        if bug == "weight_assigned":
            self.layers[2].mlp.down_proj.weight = self.layers[1].mlp.down_proj.weight
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @torch.no_grad()
    def post_init(self) -> None:
        std = self.config.initializer_range
        for name, p in self.named_parameters():
            if p.dim() > 1:
                outputs = ("o_proj.weight", "down_proj.weight") if self.bug != "unscaled_feed" else ("o_proj.weight",)
                scaled = name.endswith(outputs) and self.bug != "unscaled_init"
                p.normal_(0.0, std / math.sqrt(2 * self.config.num_hidden_layers) if scaled else std)
        self.embed_tokens.weight[self.config.pad_token_id].zero_()
        if self.bug == "slightly_large_head":
            self.lm_head.weight.mul_(4)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool = False,
        labels: Tensor | None = None,
    ):
        B, T = input_ids.shape
        cache = past_key_values if past_key_values is not None else (Cache() if use_cache else None)
        past = cache.get_seq_length() if cache is not None else 0
        if position_ids is None:
            position_ids = torch.arange(past, past + T, device=input_ids.device)[None].expand(B, -1)
        keys = torch.arange(past + T, device=input_ids.device)
        allowed = (keys[None, :] <= (keys[past:])[:, None])[None, None].expand(B, 1, -1, -1)
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :].bool()
        x = self.embed_tokens(input_ids)
        mask = torch.zeros(allowed.shape, dtype=x.dtype, device=x.device)
        mask = mask.masked_fill(~allowed, torch.finfo(x.dtype).min)
        rope = self.rope(position_ids, x.dtype)
        for i, layer in enumerate(self.layers):
            if self.bug == "last_layer_skipped":
                layer = self.layers[min(i, 1)]
            x = layer(x, mask, rope, cache)
            if self.bug == "layer_twice" and i == 1:
                x = layer(x, mask, rope, cache)
            if self.bug == "layer_twice_without_cache" and i == 1 and cache is None:
                x = layer(x, mask, rope, cache)
        logits = self.lm_head(self.norm(x))
        if self.bug == "constant_logits":
            logits = self.lm_head(self.norm(x)).detach() * 0 + self.lm_head.weight.sum(-1)
        loss = None
        if labels is not None:
            if self.bug == "eos_masked":
                labels = torch.where(labels == self.config.eos_token_id, -100, labels)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)
        return SimpleNamespace(loss=loss, logits=logits, past_key_values=cache)

    def rope(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        width = self.config.hidden_size // self.config.num_attention_heads
        inv_freq = self.config.rope_theta ** (-torch.arange(0, width, 2, device=position_ids.device) / width)
        angles = position_ids[..., None].float() * inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def build(bug: str | None = None, **changes: object) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return CausalLM(SimpleNamespace(**{**CONFIG, **changes}), bug).eval()


BUGS = {
    "softmax_twice": "attention_weights",
    "softmax_twice_masked": "attention_weights",
    "weights_squared": "attention_weights",
    "values_from_keys": "dead_gradient",
    "attention_shared": "layer_reuse",
    "weight_assigned": "layer_reuse",
    "layer_twice": "layer_reuse",
    "layer_twice_without_cache": "layer_reuse",
    "last_layer_skipped": "layer_reuse",
    "rotated_twice": "rope_relative",
    "eos_masked": "loss_padding",
    "half_softmax": "low_precision",
    "constant_logits": "constant_logits",
    "post_norm": "norm_placement",
    "unscaled_init": "residual_growth",
    "unscaled_feed": "residual_growth",
    "slightly_large_head": "init_loss",
}
