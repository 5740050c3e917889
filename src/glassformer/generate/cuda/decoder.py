"""One sequence on a GPU: a model's weights as the persistent kernel reads them, its cache, and the launching."""

from typing import Any

import torch
from torch import Tensor

from glassformer import config as c
from glassformer.model import DecoderLM
from glassformer.model.block import Block
from glassformer.model.norm import LayerNorm
from glassformer.model.positions import Learned, Rotary, Sinusoidal, sinusoids
from glassformer.shapes import Float, Int

WARPS = 8


class CudaDecodeError(ValueError):
    """What the kernel cannot do. One sentence."""


def obstacle(config: c.ModelConfig) -> str | None:
    """Why the kernel cannot run a model of this config; None when it can."""
    if not isinstance(config, c.DecoderConfig):
        return "only decoder-only models have a persistent kernel"
    if config.placement != "pre" or isinstance(config.feedforward, c.MoE | c.NoFeedForward):
        return "the persistent kernel knows pre-norm blocks with one feed-forward"
    if config.attention.qk_norm is not None or config.embedding.norm or config.embedding.n_segments:
        return "norms of queries, keys or embeddings and segments are not in the persistent kernel"
    if isinstance(config.position, c.T5Bias | c.Infused | c.Alibi):
        return f"positions of kind {config.position.kind!r} are not in the persistent kernel"
    if config.head is None or config.head.transform is not None:
        return "a head with a transform, or none, is not in the persistent kernel"
    if _power(config.d_model) > 2048 or _power(config.d_ff) > 8192:
        return "rows of more than 2,048 or hidden layers of more than 8,192 do not fit a program's registers"
    return None


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


class CudaDecoder:
    """The cache of one sequence of at most `capacity` tokens, and the kernel that extends it."""

    def __init__(
        self,
        model: DecoderLM,
        capacity: int | None = None,
        programs: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ):
        cfg = model.config
        reason = obstacle(cfg)
        if reason is not None:
            raise CudaDecodeError(f"{reason}: use engine='torch'.")
        assert isinstance(cfg, c.DecoderConfig)
        self.config, self.device = cfg, model.device
        self.capacity = min(capacity or cfg.max_len or 1024, cfg.max_len or (capacity or 1024))
        if programs is None:
            programs = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.programs = programs
        self.place = 0
        self.tokens = torch.zeros(self.capacity + 1, dtype=torch.int32, device=self.device)
        self.logits = torch.zeros(cfg.vocab_size, device=self.device)
        self.counter = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.given = {**_weights(model, dtype), **self._buffers(dtype), **self._positions(model.decoder.position)}
        self.shape = self._shape(model)

    def _buffers(self, dtype: torch.dtype) -> dict[str, Tensor]:
        cfg, new = self.config, self._empty
        splits = self._splits()
        windows = [cfg.window(layer) or 2**30 for layer in range(cfg.n_layers)]
        stored = (cfg.n_layers, cfg.n_kv_heads, self.capacity)
        return {
            "keys": new(*stored, cfg.d_head, dtype=dtype), "values": new(*stored, cfg.d_value, dtype=dtype),
            "qkv": new((cfg.n_heads + cfg.n_kv_heads) * cfg.d_head + cfg.n_kv_heads * cfg.d_value),
            "peaks": new(splits * cfg.n_heads), "sums": new(splits * cfg.n_heads),
            "parts": new(splits * cfg.n_heads, cfg.d_value), "mix": new(cfg.d_model), "hidden": new(cfg.d_ff),
            "fed": new(cfg.d_model), "best": new(self.programs), "best_at": new(self.programs, dtype=torch.int32),
            "windows": torch.tensor(windows, dtype=torch.int32, device=self.device),
        }  # fmt: skip

    def _empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _splits(self) -> int:
        return max(1, min(8, self.programs // self.config.n_heads))

    def _positions(self, scheme: Any) -> dict[str, Tensor]:
        """Tables of positions, as long as the cache; a number where there is none."""
        nothing = self._empty(1)
        found = {"places": nothing, "cosines": nothing, "sines": nothing}
        steps = torch.arange(self.capacity, device=self.device)
        match scheme:
            case Learned():
                found["places"] = scheme.weight.detach()[scheme.offset :].float().contiguous()
            case Sinusoidal():
                found["places"] = sinusoids(steps, self.config.d_model, scheme.spec).float().contiguous()
            case Rotary():
                found["cosines"], found["sines"] = (t.contiguous() for t in scheme.table(steps, torch.float32))
        return found

    def _shape(self, model: DecoderLM) -> dict[str, Any]:
        """What the kernel is compiled for."""
        cfg, norm = self.config, model.decoder.norm
        scheme: Any = model.decoder.position
        feed = cfg.feedforward
        assert isinstance(feed, c.Dense | c.Gated)
        rotary = isinstance(scheme, Rotary)
        return {
            "L": cfg.n_layers, "D": cfg.d_model, "DP": _power(cfg.d_model), "H": cfg.n_heads, "G": cfg.n_kv_heads,
            "K": cfg.d_head, "KP": _power(cfg.d_head), "U": cfg.d_value, "UP": _power(cfg.d_value),
            "MP": _power(cfg.n_heads * cfg.d_value), "F": cfg.d_ff, "FP": _power(cfg.d_ff), "V": cfg.vocab_size,
            "CAPACITY": self.capacity, "SPLITS": self._splits(), "KEYS": 32, "PP": _power(self.programs),
            "R_QKV": 16, "R_OUT": 8, "R_UP": 16, "R_DOWN": 8, "R_HEAD": 16,
            "PLACED": isinstance(scheme, Learned | Sinusoidal), "ROTATED": scheme.d_rotated if rotary else 0,
            "HALVES": rotary and scheme.spec.pairing == "halves", "GATED": int(isinstance(feed, c.Gated)),
            "ACTIVATION": feed.activation, "CENTRED": isinstance(norm, LayerNorm),
            "SHIFTED": getattr(norm, "bias", None) is not None, "BIASED": _biased(model),
            "HEAD_BIASED": model.head is not None and model.head.bias is not None,
        }  # fmt: skip

    def take(self, tokens: list[int], kept: list[tuple[Tensor, Tensor]]) -> None:
        """A prompt that the engine has read but for its last token: keys and values (G, S, K) of each layer."""
        for layer, (k, v) in enumerate(kept):
            self.given["keys"][layer, :, : k.shape[1]] = k
            self.given["values"][layer, :, : v.shape[1]] = v
        self.tokens[: len(tokens)] = torch.tensor(tokens, dtype=torch.int32, device=self.device)
        self.place = len(tokens) - 1

    def greedy(self, count: int) -> Int[Tensor, "N"]:
        """The next `count` tokens, each the likeliest, in one launch."""
        if self.place + count > self.capacity:
            raise CudaDecodeError(f"the cache holds {self.capacity} tokens: {count} more do not fit.")
        self._launch(count)
        start = self.place + 1
        self.place += count
        return self.tokens[start : start + count]

    def step(self, token: int | None = None) -> Float[Tensor, "V"]:
        """Logits after the token at the end, which may be another than the likeliest one that stands there."""
        if token is not None:
            self.tokens[self.place] = token
        self.greedy(1)
        return self.logits

    def _launch(self, count: int) -> None:
        from glassformer.generate.cuda.kernel import decode

        cfg = self.config
        self.counter.zero_()
        eps = getattr(cfg.norm, "eps", 1e-5)
        decode[(self.programs,)](
            self.tokens, self.place, count, **self.given, logits=self.logits, counter=self.counter, eps=eps,
            scale=cfg.scale, embed_scale=cfg.embedding.scale, num_warps=WARPS, **self.shape,
        )  # fmt: skip


def _biased(model: DecoderLM) -> bool:
    return any(module.bias is not None for module in model.modules() if isinstance(module, torch.nn.Linear))


@torch.no_grad()
def _weights(model: DecoderLM, dtype: torch.dtype) -> dict[str, Any]:
    """Matrices of all layers stacked, in `dtype`; norms and biases in float32, a missing bias as zeros."""
    blocks = [block for block in model.blocks if isinstance(block, Block)]

    def stacked(*names: str) -> Tensor:
        modules: list[list[Any]] = [[block.get_submodule(name) for name in names] for block in blocks]
        rows = [torch.cat([module.weight for module in row]) for row in modules]
        return torch.stack(rows).to(dtype).contiguous()

    def shifts(*names: str) -> Tensor:
        def one(block: Block, name: str) -> Tensor:
            module: Any = block.get_submodule(name)
            bias = getattr(module, "bias", None)
            return module.weight.new_zeros(module.weight.shape[0]) if bias is None else bias

        return torch.stack([torch.cat([one(block, name) for name in names]) for block in blocks]).float().contiguous()

    assert model.head is not None
    gated = isinstance(model.config.feedforward, c.Gated)
    projections = ("attention.q", "attention.k", "attention.v")
    ups = ("feedforward.up", "feedforward.gate") if gated else ("feedforward.up",)
    last: Any = model.decoder.norm
    zeros = last.weight.new_zeros(1).float()
    table = model.embed.tokens.weight
    return {
        "table": table.to(dtype).contiguous(),
        "head": (table if model.head.weight is None else model.head.weight).to(dtype).contiguous(),
        "head_bias": zeros if model.head.bias is None else model.head.bias.float(), "head_scale": model.head.scale,
        "norm_a": stacked_norm(blocks, "norm_attention", "weight"),
        "norm_a_bias": stacked_norm(blocks, "norm_attention", "bias"),
        "norm_f": stacked_norm(blocks, "norm_feedforward", "weight"),
        "norm_f_bias": stacked_norm(blocks, "norm_feedforward", "bias"),
        "last_norm": last.weight.float().contiguous(),
        "last_norm_bias": zeros if getattr(last, "bias", None) is None else last.bias.float().contiguous(),
        "w_qkv": stacked(*projections), "b_qkv": shifts(*projections),
        "w_out": stacked("attention.o"), "b_out": shifts("attention.o"),
        "w_up": stacked(*ups), "b_up": shifts("feedforward.up"),
        "w_down": stacked("feedforward.down"), "b_down": shifts("feedforward.down"),
    }  # fmt: skip


def stacked_norm(blocks: list[Block], name: str, what: str) -> Float[Tensor, "L D"]:
    """A norm's weight or bias of every layer; zeros where it has none."""
    norms: list[Any] = [block.get_submodule(name) for block in blocks]
    found = [getattr(norm, what, None) for norm in norms]
    rows = [n.weight.new_zeros(n.weight.shape) if t is None else t for n, t in zip(norms, found, strict=True)]
    return torch.stack(rows).float().contiguous()
