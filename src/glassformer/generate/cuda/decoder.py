"""One sequence on a GPU: a model's weights as the persistent kernel reads them, its cache, and the launching."""

import torch
from torch import Tensor

from glassformer import config as c
from glassformer import nvrtc
from glassformer.generate.cuda import library
from glassformer.generate.cuda.library import CudaDecodeError
from glassformer.generate.cuda.pack import ENDLESS, kernel_sizes, obstacle, position_tables, stacked_weights
from glassformer.model import DecoderLM
from glassformer.shapes import Float, Int

WARPS = 12
"""Of 32 threads in each block."""


def _processors(model: DecoderLM) -> int:
    return int(torch.cuda.get_device_properties(model.device).multi_processor_count)


def kernel_text(model: DecoderLM, dtype: torch.dtype) -> str:
    """The kernel's source for a model."""
    return library.source(kernel_sizes(model, dtype, _processors(model), WARPS))


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
        self.programs = programs = programs or _processors(model)
        self.place = 0
        self.tokens = torch.zeros(self.capacity + 1, dtype=torch.int32, device=self.device)
        self.logits = torch.zeros(cfg.vocab_size, device=self.device)
        self.counter = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.given = {**stacked_weights(model, dtype), **self._buffers(dtype), **position_tables(model, self.capacity)}
        self.sizes = kernel_sizes(model, dtype, programs, WARPS)
        self.text, self.limit = library.source(self.sizes), cfg.max_len or 2**30
        self.dtype = dtype

    def _buffers(self, dtype: torch.dtype) -> dict[str, Tensor]:
        cfg, new = self.config, self._empty
        splits = self._splits()
        windows = [cfg.window(layer) or ENDLESS for layer in range(cfg.n_layers)]
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
        return max(1, self.programs // self.config.n_heads)

    def refresh(self, model: DecoderLM) -> None:
        """The model's weights as they are now, in the same places."""
        for name, new in stacked_weights(model, self.dtype).items():
            if isinstance(new, Tensor):
                self.given[name].copy_(new)

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
        assert self.device.type == "cuda"
        self.counter.zero_()
        kernel = nvrtc.kernel(self.text, "decode", self.device.index or 0)
        kernel.launch(self.arguments(count), self.programs, 32 * WARPS, together=True)

    def arguments(self, count: int) -> library.Given:
        """For `count` tokens from the present place on."""
        cfg, given = self.config, library.Given()
        held = {**self.given, "tokens": self.tokens, "counter": self.counter, "logits": self.logits}
        for name in library.TENSORS:
            setattr(given, name, held[name].data_ptr())
        given.embed_scale, given.head_scale, given.scale = cfg.embedding.scale, self.given["head_scale"], cfg.scale
        given.eps = getattr(cfg.norm, "eps", 1e-5)
        given.place, given.count, given.capacity, given.splits = self.place, count, self.capacity, self._splits()
        return given
