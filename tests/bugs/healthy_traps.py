"""Correct models that look broken, and correct models that are spelled in other ways. None of them may raise an alarm.

The numbers are those of the list of traps.
"""

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.bugs.base import MLP, Attention, Cache, Config, make
from tests.bugs.base_decoder import Decoder
from tests.bugs.base_encoders import Encoder

V, D, L, H = 97, 48, 2, 4


class NanoAttention(nn.Module):
    """One matrix for q, k and v; torch's causal kernel."""

    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (H, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class NanoBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(D), NanoAttention(), nn.LayerNorm(D)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoStyle(nn.Module):
    """`model(idx, targets) -> logits, loss`; without targets only the last position's logits are computed."""

    def __init__(self):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(V, D),
                "wpe": nn.Embedding(128, D),
                "h": nn.ModuleList(NanoBlock() for _ in range(L)),
                "ln_f": nn.LayerNorm(D),
            }
        )
        self.lm_head = nn.Linear(D, V, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight
        fresh(self)

    def hidden(self, idx: Tensor) -> Tensor:
        places = torch.arange(idx.shape[1], device=idx.device)
        x = self.transformer["wte"](idx) + self.transformer["wpe"](places)
        for block in self.transformer["h"]:
            x = block(x)
        return self.transformer["ln_f"](x)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.hidden(idx)
        if targets is None:
            return self.lm_head(x[:, [-1]]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


@torch.no_grad()
def fresh(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, 0.02)
        elif name.endswith("bias"):
            parameter.zero_()


def nano_style() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return NanoStyle().eval()


class DictOutput(nn.Module):
    """`model(idx) -> {"logits": ...}`."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, idx: Tensor) -> dict[str, Tensor]:
        return {"logits": self.inner(idx)}


class TokensOnly(nn.Module):
    """`model(idx) -> logits` and nothing else: no mask, no positions, no cache, no config."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, idx: Tensor) -> Tensor:
        return self.inner(idx)


def plain_callable():
    """No module at all: a function from ids to logits."""
    model = make(Config(position="rotary"))

    def logits(idx: Tensor) -> Tensor:
        with torch.no_grad():
            return model(idx)

    return logits


class TorchStyle(nn.Module):
    """torch's own encoder layers with its own causal mask: the tutorial's language model."""

    def __init__(self, norm_first: bool):
        super().__init__()
        self.tokens, self.table = nn.Embedding(V, D), nn.Embedding(128, D)
        layer = nn.TransformerEncoderLayer(D, H, 80, 0.1, "gelu", batch_first=True, norm_first=norm_first)
        self.layers = nn.TransformerEncoder(layer, L, nn.LayerNorm(D), enable_nested_tensor=False)
        self.head = nn.Linear(D, V)
        fresh(self)

    def forward(self, idx: Tensor) -> Tensor:
        T = idx.shape[1]
        x = self.tokens(idx) + self.table(torch.arange(T, device=idx.device))
        return self.head(self.layers(x, mask=nn.Transformer.generate_square_subsequent_mask(T), is_causal=True))


def torch_style(norm_first: bool) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return TorchStyle(norm_first).eval()


class PrefixLM(Decoder):
    """The first 8 tokens see one another: declared, and so no leak."""

    def pattern(self, queries, keys):
        return super().pattern(queries, keys) | (keys < 8)[None, :]


class PadDerived(Encoder):
    """Trap 2: positions count the tokens that are not the pad id, so junk as padding moves them."""

    def count_positions(self, cache, real):
        return super().count_positions(cache, real & self.not_pad)

    def forward(self, idx, attention_mask=None, positions=None):
        self.not_pad = idx != 0
        return super().forward(idx, attention_mask, positions)


class RollingCache(Cache):
    """Trap 8: keeps what the window still sees, and says so when asked to go back."""

    width = 8

    def note(self, real, positions):
        if len(self):
            self.real, self.positions = self.real[:, 1 - self.width :], self.positions[:, 1 - self.width :]
        super().note(real, positions)

    def extend(self, layer, k, v):
        if self.keys[layer] is not None:
            self.keys[layer] = self.keys[layer][:, :, 1 - self.width :]
            self.values[layer] = self.values[layer][:, :, 1 - self.width :]
        return super().extend(layer, k, v)

    def crop(self, n):
        if len(self) and int(self.seen.max()) > self.width:
            raise RuntimeError("a rolling cache has forgotten what lies before its window: it cannot be cropped")
        super().crop(n)


class SlopeTimesKey(Attention):
    """Trap 9: slope times the key's place; softmax does not see what is constant in a row."""

    def alibi(self, queries, keys):
        heads = torch.arange(1, self.cfg.n_heads + 1)
        slopes = 2.0 ** (-8 * heads / self.cfg.n_heads)
        bias = (slopes[:, None, None] * keys[:, None, None, :]).expand(-1, -1, queries.shape[1], -1)
        return bias.to(self.q_proj.weight.dtype)


class QKNorm(Attention):
    """Trap 7: unit queries and keys with a learned scale; nothing is divided by sqrt(d_head)."""

    def score(self, q, k):
        return F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-1, -2) * self.temperature


class SoftCap(Attention):
    """Scores squeezed into (-5, 5): the ratio to q·k is not constant, and need not be."""

    def score(self, q, k):
        return 5 * torch.tanh(super().score(q, k) / 5)


class SharedKeyValue(Attention):
    """One projection gives keys and values; there is no other, so nothing is unused."""

    def forward(self, x, around, cache=None):
        q, k = self.split(self.q_proj(x), self.cfg.n_heads), self.split(self.k_proj(x), self.cfg.n_kv_heads)
        v = k
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        return self.out_proj(self.attend(q, k, v, around.allowed, None))


class TalkingHeads(Attention):
    """Heads exchange their weights after softmax, by a learned matrix: published, and no second softmax."""

    def normalise(self, scores):
        return torch.einsum("bhts,hg->bgts", super().normalise(scores), self.talk)


class GatedWeights(Attention):
    """A learned exponent on the weights, then a renormalisation."""

    def normalise(self, scores):
        weights = super().normalise(scores) ** self.exponent
        return weights / weights.sum(-1, keepdim=True)


class MaskedAfterwards(Attention):
    """Weights are masked once more and renormalised, which changes nothing."""

    def normalise(self, scores):
        weights = super().normalise(scores)
        weights = weights * (scores > -1e30)
        return weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)


def shared_key_value() -> nn.Module:
    model = changed(Config(), "*.attention", SharedKeyValue)
    for block in model.blocks:
        del block.attention.v_proj
    return model


def talking_heads() -> nn.Module:
    model = changed(Config(), "*.attention", TalkingHeads)
    for block in model.blocks:
        block.attention.talk = nn.Parameter(torch.eye(H) + 0.1)
    return model


def gated_weights() -> nn.Module:
    model = changed(Config(), "*.attention", GatedWeights)
    for block in model.blocks:
        block.attention.exponent = nn.Parameter(torch.tensor(1.5))
    return model


class SquaredRelu(MLP):
    def activate(self, x):
        return F.relu(x).square()


def changed(cfg: Config, at: str, sick: type, warm: float = 1.0) -> nn.Module:
    model = make(cfg, warm=warm)
    for name, module in model.named_modules():
        if name == at or (at.startswith("*") and name.endswith(at[1:])):
            module.__class__ = sick
    return model


def slope_times_key() -> nn.Module:
    return changed(Config(position="alibi"), "*.attention", SlopeTimesKey)


def qk_norm() -> nn.Module:
    model = changed(Config(position="rotary"), "*.attention", QKNorm)
    for block in model.blocks:
        block.attention.temperature = nn.Parameter(torch.tensor(10.0))
    return model


def rolling() -> nn.Module:
    model = make(Config(position="rotary", window=8))
    model.cache_class = RollingCache
    return model


def sharp() -> nn.Module:
    """Attention as sharp as after training: rounding is amplified, nothing is wrong."""
    return make(Config(position="rotary", norm="rmsnorm", activation="swiglu"), warm=10.0)


def zero_init() -> nn.Module:
    """Residual projections start at 0, so that every block starts as the identity: most first gradients are 0."""
    model = make(Config(position="rotary", scaled_init=False))
    with torch.no_grad():
        for block in model.blocks:
            block.attention.out_proj.weight.zero_()
            block.mlp.down.weight.zero_()
    return model


def frozen_embedding() -> nn.Module:
    """Not trainable, on purpose: no gradient is due."""
    model = make(Config(tie_weights=False))
    model.tokens.weight.requires_grad_(False)
    return model


def shared_layers() -> nn.Module:
    """One block three times: the same module at three depths. Keys are cached per depth, so it takes no cache."""
    model = make(Config(n_layers=1, position="rotary"))
    model.blocks = nn.ModuleList([model.blocks[0]] * 3)
    return TokensOnly(model)


@torch.enable_grad()
def trained() -> nn.Module:
    """Trap 12: sixty steps on a pattern; blocks are louder than at the start, and the loss is far from ln V."""
    model = make(Config(n_layers=2, max_len=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        start = torch.randint(0, V, (16, 1), generator=generator)
        optimizer.zero_grad()
        model.loss((start + 3 * torch.arange(24)) % V).backward()
        optimizer.step()
    model.zero_grad(set_to_none=True)
    return model.eval()


def reloaded() -> nn.Module:
    """Through a state dict and a deep copy: tying and numbers survive."""
    model = make(Config(), seed=1)
    model.load_state_dict(make(Config()).state_dict())
    return copy.deepcopy(model)


def embedding_scaled() -> nn.Module:
    """The embedding is multiplied by sqrt(d_model), as Vaswani et al. and Gemma do."""

    class Scaled(Decoder):
        def embed(self, idx, positions):
            return super().embed(idx, positions) * math.sqrt(D)

    return changed(Config(position="rotary"), "", Scaled)


class ClosureBlock(nn.Module):
    """The feed-forward is a lambda over the block's own submodules, as in minGPT: a deep copy calls the original's."""

    def __init__(self):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(D), NanoAttention(), nn.LayerNorm(D)
        parts = {"up": nn.Linear(D, 4 * D), "act": nn.GELU(), "down": nn.Linear(4 * D, D), "drop": nn.Dropout(0.1)}
        self.mlp = mlp = nn.ModuleDict(parts)
        self.feed = lambda x: mlp["drop"](mlp["down"](mlp["act"](mlp["up"](x))))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.feed(self.ln_2(x))


def closure_blocks() -> nn.Module:
    model = nano_style()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model.transformer["h"] = nn.ModuleList(ClosureBlock() for _ in range(L))
        fresh(model)
    return model.train()
