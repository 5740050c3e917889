"""Small, readable, correct Transformers in plain PyTorch: a stand-in for the code that people bring to the doctor.

Nothing here is glassformer's. The spelling: `model(idx) -> logits (B,T,V)`, optionally `attention_mask` (1 = real) and
`positions`; `cache = model.new_cache()` and then `model(new, cache=cache) -> logits, cache` with `len(cache)`,
`cache.crop(n)`, `cache.reorder(rows)`; `model.loss`, `model.generate`, `model.config`, `model.blocks`.

Every decision sits in a method of its own, so that the zoo can break one thing by overriding one method. Encoder and
encoder-decoder are in base_encoders.py.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """The declared design. Sizes differ from one another, so that swapped axes show."""

    kind: str = "decoder"
    vocab_size: int = 97
    d_model: int = 48
    n_layers: int = 3
    n_heads: int = 4
    n_kv_heads: int = 4
    d_ff: int = 80
    max_len: int = 128
    position: str = "learned"  # learned, rotary, alibi, sinusoidal, none
    rope_base: float = 10000.0
    rope_pairing: str = "halves"  # halves, interleaved
    norm: str = "layernorm"  # layernorm, rmsnorm
    norm_eps: float = 1e-5
    norm_placement: str = "pre"  # pre, post, parallel
    activation: str = "gelu"  # gelu, gelu_tanh, swiglu
    attention_scale: float | None = None
    window: int | None = None
    tie_weights: bool = True
    dropout: float = 0.0
    init_std: float = 0.02
    scaled_init: bool = True
    """Residual projections start at init_std / sqrt(2 n_layers)."""
    fused: bool = False
    """Attention through torch's own kernel."""
    mask_fill: str = "inf"  # inf, min
    see_self: bool = True
    """A padding place sees itself, so that no softmax row is empty."""
    start: int = 1
    """First target token of an encoder-decoder."""

    @property
    def d_head(self) -> int:
        return self.d_model // self.n_heads


@dataclass
class Around:
    """What all layers share in one call: where queries and keys stand, and who sees whom."""

    queries: Tensor  # (B, T) positions
    keys: Tensor  # (B, S) positions
    allowed: Tensor  # (B, 1, T, S), True = may attend
    real: Tensor  # (B, S), which keys are no padding
    memory: Tensor | None = None  # (B, N, D), an encoder's output
    memory_allowed: Tensor | None = None  # (B, 1, 1, N)


class Cache:
    """Keys and values per layer, and what is known of the tokens: which are real, where they stand."""

    def __init__(self, n_layers: int):
        self.keys: list[Tensor | None] = [None] * n_layers
        self.values: list[Tensor | None] = [None] * n_layers
        self.cross: list[tuple[Tensor, Tensor] | None] = [None] * n_layers
        self.memory_allowed: Tensor | None = None
        self.real: Tensor | None = None  # (B, S)
        self.positions: Tensor | None = None  # (B, S)
        self.seen: Tensor | int = 0  # (B, 1), the next position of each row

    def __len__(self) -> int:
        return 0 if self.real is None else self.real.shape[1]

    def note(self, real: Tensor, positions: Tensor) -> None:
        """New tokens come, before any layer runs."""
        self.real = real if self.real is None else torch.cat([self.real, real], 1)
        self.positions = positions if self.positions is None else torch.cat([self.positions, positions], 1)
        self.count()

    def count(self) -> None:
        self.seen = torch.where(self.real, self.positions + 1, 0).amax(1, keepdim=True) if len(self) else 0

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.keys[layer] is not None:
            k, v = torch.cat([self.keys[layer], k], 2), torch.cat([self.values[layer], v], 2)
        self.keys[layer], self.values[layer] = k, v
        return k, v

    def crop(self, n: int) -> None:
        """Back to the state after the first n tokens."""
        self.crop_tensors(n)
        if self.real is not None:
            self.real, self.positions = self.real[:, :n], self.positions[:, :n]
            self.count()

    def crop_tensors(self, n: int) -> None:
        self.keys = [k if k is None else k[:, :, :n] for k in self.keys]
        self.values = [v if v is None else v[:, :, :n] for v in self.values]

    def reorder(self, rows: Tensor | list[int]) -> None:
        """Row i becomes what row rows[i] was."""
        rows = torch.as_tensor(rows)
        self.reorder_tensors(rows)
        self.reorder_tokens(rows)

    def reorder_tensors(self, rows: Tensor) -> None:
        self.keys = [k if k is None else k[rows] for k in self.keys]
        self.values = [v if v is None else v[rows] for v in self.values]
        self.cross = [pair and (pair[0][rows], pair[1][rows]) for pair in self.cross]

    def reorder_tokens(self, rows: Tensor) -> None:
        if self.real is not None:
            self.real, self.positions = self.real[rows], self.positions[rows]
            self.count()
        if self.memory_allowed is not None:
            self.memory_allowed = self.memory_allowed[rows]


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias, over the last axis, variance divided by D."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def make_norm(cfg: Config) -> nn.Module:
    return (RMSNorm if cfg.norm == "rmsnorm" else LayerNorm)(cfg.d_model, cfg.norm_eps)


class Attention(nn.Module):
    """softmax(scale q k^T + bias) v; query head h reads key/value head h // (H/G)."""

    def __init__(self, cfg: Config, layer: int):
        super().__init__()
        self.cfg, self.layer = cfg, layer
        self.scale = cfg.d_head**-0.5 if cfg.attention_scale is None else cfg.attention_scale
        self.q_proj = nn.Linear(cfg.d_model, cfg.n_heads * cfg.d_head)
        self.k_proj = nn.Linear(cfg.d_model, cfg.n_kv_heads * cfg.d_head)
        self.v_proj = nn.Linear(cfg.d_model, cfg.n_kv_heads * cfg.d_head)
        self.out_proj = nn.Linear(cfg.n_heads * cfg.d_head, cfg.d_model)
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, x: Tensor, around: Around, cache: Cache | None = None) -> Tensor:
        q = self.split(self.q_proj(x), self.cfg.n_heads)
        k, v = self.split(self.k_proj(x), self.cfg.n_kv_heads), self.split(self.v_proj(x), self.cfg.n_kv_heads)
        if self.cfg.position == "rotary":
            q, k, v = self.rotate(q, k, v, around.queries)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        bias = self.alibi(around.queries, around.keys) if self.cfg.position == "alibi" else None
        return self.out_proj(self.attend(q, k, v, around.allowed, bias))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, bias: Tensor | None) -> Tensor:
        k, v = self.share(k), self.share(v)
        if self.cfg.fused:
            return self.merge(self.kernel(q, k, v, allowed, bias))
        scores = self.score(q, k)
        if bias is not None:
            scores = scores + bias
        weights = self.normalise(self.hide(scores, allowed))
        return self.merge(self.dropout(weights) @ v)

    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)  # (B, heads, T, K)

    def merge(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)  # (B, T, H·K)

    def share(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.cfg.n_heads // self.cfg.n_kv_heads, dim=1)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-1, -2) * self.scale

    def hide(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return scores.masked_fill(~allowed, self.fill(scores.dtype))

    def fill(self, dtype: torch.dtype) -> float:
        return float("-inf") if self.cfg.mask_fill == "inf" else torch.finfo(dtype).min

    def normalise(self, scores: Tensor) -> Tensor:
        return torch.softmax(scores, dim=-1)

    def kernel(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, bias: Tensor | None) -> Tensor:
        mask = allowed if bias is None else self.hide(bias.expand(allowed.shape[0], -1, -1, -1), allowed)
        drop = self.cfg.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=drop, scale=self.scale)

    def rotate(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        angles = self.angles(positions)
        return self.turn(q, angles), self.turn(k, angles), v

    def angles(self, positions: Tensor) -> Tensor:
        width = self.cfg.d_head
        frequencies = self.cfg.rope_base ** (-torch.arange(0, width, 2, device=positions.device) / width)
        return positions[:, None, :, None] * frequencies  # (B, 1, T, K/2)

    def turn(self, x: Tensor, angles: Tensor) -> Tensor:
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        if self.cfg.rope_pairing == "halves":
            a, b = x.chunk(2, -1)
            return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)

    def alibi(self, queries: Tensor, keys: Tensor) -> Tensor:
        heads = torch.arange(1, self.cfg.n_heads + 1, device=queries.device)
        slopes = 2.0 ** (-8 * heads / self.cfg.n_heads)
        distance = (queries[:, :, None] - keys[:, None, :]).abs()
        return (-slopes[:, None, None] * distance[:, None]).to(self.q_proj.weight.dtype)  # (B, H, T, S)


class MLP(nn.Module):
    """down(gelu(up(x))), or down(silu(gate(x)) * up(x))."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.cfg = cfg
        self.up, self.down = nn.Linear(cfg.d_model, cfg.d_ff), nn.Linear(cfg.d_ff, cfg.d_model)
        self.gate = nn.Linear(cfg.d_model, cfg.d_ff) if cfg.activation == "swiglu" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            return self.down(self.activate(self.gate(x)) * self.up(x))
        return self.down(self.activate(self.up(x)))

    def activate(self, x: Tensor) -> Tensor:
        if self.cfg.activation == "swiglu":
            return F.silu(x)
        return F.gelu(x, approximate="tanh" if self.cfg.activation == "gelu_tanh" else "none")


class Block(nn.Module):
    """Two branches on a residual stream."""

    def __init__(self, cfg: Config, layer: int):
        super().__init__()
        self.cfg, self.layer = cfg, layer
        self.norm1, self.norm2 = make_norm(cfg), make_norm(cfg)
        self.attention, self.mlp = Attention(cfg, layer), MLP(cfg)
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, x: Tensor, around: Around, cache: Cache | None = None) -> Tensor:
        match self.cfg.norm_placement:
            case "post":
                x = self.norm1(x + self.dropout(self.attention(x, around, cache)))
                return self.norm2(x + self.dropout(self.mlp(x)))
            case "parallel":
                attended = self.attention(self.norm1(x), around, cache)
                return x + self.dropout(attended) + self.dropout(self.mlp(self.norm2(x)))
            case _:
                x = x + self.dropout(self.attention(self.norm1(x), around, cache))
                return x + self.dropout(self.mlp(self.norm2(x)))


class Transformer(nn.Module):
    """Embedding, positions, masks and head: what decoder and encoder share."""

    cache_class = Cache

    def __init__(self, cfg: Config):
        super().__init__()
        self.config = self.cfg = cfg
        self.tokens = nn.Embedding(cfg.vocab_size, cfg.d_model)
        self.table = nn.Embedding(cfg.max_len, cfg.d_model) if cfg.position == "learned" else None
        self.dropout = nn.Dropout(cfg.dropout)
        self.blocks = self.make_blocks(cfg)
        self.norm = nn.Identity() if cfg.norm_placement == "post" else make_norm(cfg)
        self.head = nn.Linear(cfg.d_model, cfg.vocab_size, bias=False)
        if cfg.tie_weights:
            self.head.weight = self.tokens.weight
        self.init_weights()

    def make_blocks(self, cfg: Config) -> nn.ModuleList:
        return nn.ModuleList(Block(cfg, layer) for layer in range(cfg.n_layers))

    @torch.no_grad()
    def init_weights(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                std = self.cfg.init_std
                if self.cfg.scaled_init and name.endswith(("out_proj.weight", "down.weight")):
                    std /= math.sqrt(2 * self.cfg.n_layers)
                parameter.normal_(0.0, std)
            elif name.endswith("proj.bias") or ".mlp." in name:
                parameter.zero_()

    def embed(self, idx: Tensor, positions: Tensor) -> Tensor:
        return self.dropout(self.place(self.tokens(idx), positions))

    def place(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.table is not None:
            return x + self.table(positions)
        return x + self.waves(positions).to(x.dtype) if self.cfg.position == "sinusoidal" else x

    def waves(self, positions: Tensor) -> Tensor:
        width = self.cfg.d_model
        frequencies = 10000.0 ** (-torch.arange(0, width, 2, device=positions.device) / width)
        angles = positions[..., None] * frequencies
        # of the size of the token embedding, or positions would drown the words of a fresh model
        return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2) * self.cfg.init_std

    def real_tokens(self, idx: Tensor, attention_mask: Tensor | None) -> Tensor:
        """(B,T) for the new tokens; a mask over all tokens of a cached call gives its last columns."""
        if attention_mask is None:
            return torch.ones_like(idx, dtype=torch.bool)
        return attention_mask[:, -idx.shape[1] :].bool()

    def count_positions(self, cache: Cache, real: Tensor) -> Tensor:
        """Real tokens are counted, on from those in the cache."""
        return (cache.seen + real.long().cumsum(1) - 1).clamp(min=0)

    def visible(self, cache: Cache, new: int) -> Tensor:
        """(B,1,T,S): the architecture's pattern, less padding keys."""
        keys = torch.arange(len(cache), device=cache.real.device)
        queries = keys[len(cache) - new :]
        allowed = self.pattern(queries, keys)[None, None] & cache.real[:, None, None, :]
        return allowed | (keys == queries[:, None]) if self.cfg.see_self else allowed

    def pattern(self, queries: Tensor, keys: Tensor) -> Tensor:
        raise NotImplementedError

    def around(self, cache: Cache, new: int) -> Around:
        return Around(cache.positions[:, len(cache) - new :], cache.positions, self.visible(cache, new), cache.real)

    def run(
        self,
        idx: Tensor,
        real: Tensor,
        positions: Tensor | None,
        noted: Cache,
        cache: Cache | None,
        memory: Tensor | None = None,
    ) -> Tensor:
        """From tokens to logits. `noted` knows the tokens, `cache` (or nothing) their keys."""
        positions = self.count_positions(noted, real) if positions is None else positions.expand(idx.shape)
        noted.note(real, positions)
        around, x = self.around(noted, idx.shape[1]), self.embed(idx, positions)
        around.memory, around.memory_allowed = memory, noted.memory_allowed
        for block in self.blocks:
            x = block(x, around, cache)
        return self.head(self.norm(x))


def counted(labels: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Labels with -100 where the token, or the one it is predicted from, is padding."""
    if attention_mask is None:
        return labels
    real = attention_mask.bool()
    after_real = torch.cat([real[:, :1], real[:, :-1]], 1)
    return labels.masked_fill(~(real & after_real), -100)


def make(cfg: Config, seed: int = 0, warm: float = 1.0) -> nn.Module:
    """A seeded model in evaluation mode; `warm` multiplies all matrices of the blocks, as training does."""
    from tests.bugs.base_decoder import Decoder
    from tests.bugs.base_encoders import Encoder, EncoderDecoder

    kinds = {"decoder": Decoder, "encoder": Encoder, "seq2seq": EncoderDecoder}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kinds[cfg.kind](cfg).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if warm != 1.0 and parameter.dim() > 1 and "blocks" in name:
                parameter.mul_(warm)
    return model
