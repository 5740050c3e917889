"""A Llama by hand with the interface of transformers: tuples of keys and values, outputs with attributes."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONFIG = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 160,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "eos_token_id": 2,
    "sliding_window": None,
}


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class Attention(nn.Module):
    def __init__(self, c, bug: str | None):
        super().__init__()
        self.c, self.bug, self.dim = c, bug, c.hidden_size // c.num_attention_heads
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * self.dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(c.hidden_size, c.hidden_size, bias=False)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        base = 1e6 if self.bug == "other_base" else self.c.rope_theta
        rates = base ** (-torch.arange(0, self.dim, 2, device=positions.device).float() / self.dim)
        angles = (positions[..., None].float() * rates).repeat(1, 1, 2)[:, None]
        return angles.cos(), angles.sin()

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor, past: tuple | None) -> tuple[Tensor, tuple]:
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, -1, self.dim).transpose(1, 2)
        k = self.k_proj(x).view(b, t, -1, self.dim).transpose(1, 2)
        v = self.v_proj(x).view(b, t, -1, self.dim).transpose(1, 2)
        cos, sin = self.angles(positions)
        q = turned(q, cos, sin)
        k = turned(k, cos, sin)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        present = past if past is not None and self.bug == "cache_not_extended" else (k, v)
        if self.bug == "values_not_cached" and past is not None:
            present = (k, torch.cat([past[1], past[1][:, :, -t:]], 2))
        repeat = self.c.num_attention_heads // self.c.num_key_value_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        if self.bug == "no_visible_key":  # by hand: the fused function of torch gives 0 where no key is visible
            scores = (q @ k.transpose(-2, -1) / self.dim**0.5).masked_fill(~mask, -torch.inf)
            out = scores.softmax(-1) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).reshape(b, t, -1)), present


class Layer(nn.Module):
    def __init__(self, c, bug: str | None):
        super().__init__()
        self.self_attn = Attention(c, bug)
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor, past: tuple | None) -> tuple[Tensor, tuple]:
        attended, present = self.self_attn(self.input_layernorm(x), positions, mask, past)
        x = x + attended
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y)), present


class CausalLM(nn.Module):
    def __init__(self, c, bug: str | None = None):
        super().__init__()
        self.config, self.bug = c, bug
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, bug) for _ in range(c.num_hidden_layers))
        self.norm, self.lm_head = (
            RMSNorm(c.hidden_size, c.rms_norm_eps),
            nn.Linear(c.hidden_size, c.vocab_size, bias=False),
        )
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=c.initializer_range)
        self.lm_head.weight = self.embed_tokens.weight
        if bug == "copied_head":
            self.lm_head.weight = nn.Parameter(self.embed_tokens.weight.detach().clone())
        self.kept: tuple | None = None

    def mask(self, ids: Tensor, past: int, attention_mask: Tensor | None) -> Tensor:
        t = ids.shape[1]
        i, j = torch.arange(past, past + t)[:, None], torch.arange(past + t)[None]
        if self.bug == "prompt_open" and past == 0 and self.caching:
            seen = torch.ones(t, t, dtype=torch.bool)
        elif self.bug == "mask_top_left":
            seen = j <= torch.arange(t)[:, None]
        elif self.bug == "window_too_wide":
            seen = (j <= i) & (i - j <= self.config.sliding_window)
        elif self.config.sliding_window:
            seen = (j <= i) & (i - j < self.config.sliding_window)
        else:
            seen = j <= i
        seen = seen[None, None]
        if attention_mask is not None and not (self.bug == "mask_dropped_with_cache" and past):
            real = attention_mask.bool()[:, None, None, -(past + t) :]
            seen = seen & (real if self.bug == "no_visible_key" else real | (i == j))
        return seen

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: tuple | None = None,
        labels: Tensor | None = None,
        use_cache: bool = False,
    ):
        self.caching = use_cache
        if self.bug == "cache_kept" and use_cache and past_key_values is None:
            past_key_values = self.kept
        past = 0 if past_key_values is None else past_key_values[0][0].shape[2]
        if position_ids is None:
            start = {"position_restarts": 0, "position_one_late": past + (past > 0)}.get(self.bug, past)
            position_ids = torch.arange(start, start + input_ids.shape[1]).expand_as(input_ids)
            if attention_mask is not None:
                position_ids = (attention_mask.long().cumsum(1) - 1).clamp(0)[:, -input_ids.shape[1] :]
        x, presents = self.embed_tokens(input_ids), []
        mask = self.mask(input_ids, past, attention_mask)
        for i, layer in enumerate(self.layers):
            x, present = layer(x, position_ids, mask, None if past_key_values is None else past_key_values[i])
            presents.append(present)
        logits = self.lm_head(self.norm(x))
        if self.bug == "cache_kept" and use_cache:
            self.kept = tuple(presents)
        loss = None
        if labels is not None and self.bug == "labels_not_shifted":
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        elif labels is not None and self.bug == "shift_after_flattening":
            loss = F.cross_entropy(logits.flatten(0, 1)[:-1], labels.flatten()[1:])
        elif labels is not None:
            kept = labels[:, 1:]
            if self.bug == "eos_never_learned":
                kept = kept.masked_fill(kept == self.config.eos_token_id, -100)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), kept.flatten())
        return SimpleNamespace(loss=loss, logits=logits, past_key_values=tuple(presents) if use_cache else None)


def build(bug: str | None = None, **changes: object) -> nn.Module:
    changes = {"sliding_window": 7, **changes} if bug == "window_too_wide" else changes
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return CausalLM(SimpleNamespace(**{**CONFIG, **changes}), bug).eval()


BUGS = {
    "other_base": "rope_relative",
    "cache_not_extended": "cache_mismatch",
    "values_not_cached": "cache_mismatch",
    "prompt_open": "cache_mask",
    "mask_top_left": "cache_mask",
    "window_too_wide": "window",
    "mask_dropped_with_cache": "pad_leak",
    "no_visible_key": "mask_nan",
    "cache_kept": "state_leak",
    "position_restarts": "decode_position",
    "position_one_late": "decode_position",
    "copied_head": "weight_tying",
    "labels_not_shifted": "label_shift",
    "shift_after_flattening": "label_shift",
    "eos_never_learned": "loss_padding",
}
