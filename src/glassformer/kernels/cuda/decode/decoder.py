"""One sequence on a GPU: the weights in the layout of the persistent kernel, the KV cache, and the launches."""

import weakref
from functools import cache
from typing import Any

import torch
from torch import Tensor

from glassformer import config as c
from glassformer.kernels.cuda.decode import library
from glassformer.kernels.cuda.decode.library import CudaDecodeError
from glassformer.kernels.cuda.decode.pack import (
    ENDLESS,
    kernel_sizes,
    position_tables,
    stacked_weights,
    unsupported_config,
)
from glassformer.kernels.cuda.decode.stream import MEMORY, Layout, fill
from glassformer.kernels.toolchain import nvrtc
from glassformer.model import DecoderLM
from glassformer.shapes import Float, Int

WARPS = 15
"""Warps of 32 threads in each block that compute; one more warp fetches weights."""
NEIGHBOURS = 8
"""Blocks of a cluster: 8 is the largest portable cluster size."""
PROBE = 'extern "C" __global__ void probe(int) {}'


def unsupported_device(config: c.ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why the persistent kernel cannot run on this GPU, or None if it can."""
    if torch.cuda.get_device_capability(device) < (9, 0):
        return "the GPU has no thread block clusters (compute capability 9.0 or later)"
    assert isinstance(config, c.DecoderConfig)
    if not Layout(config, dtype, _clusters(device.index or 0), NEIGHBOURS, WARPS).fits:
        return "the model does not fit a block's shared memory"
    return None


@cache
def _clusters(device: int) -> int:
    """Return how many clusters the device runs at once."""
    return nvrtc.kernel(PROBE, "probe", device, MEMORY - 1024).most_clusters(NEIGHBOURS, 32 * (WARPS + 1))


def layout_for(model: DecoderLM, dtype: torch.dtype, clusters: int | None = None) -> Layout:
    """Return how the weights are distributed over the blocks; by default over as many clusters as the GPU runs."""
    assert isinstance(model.config, c.DecoderConfig)
    return Layout(model.config, dtype, clusters or _clusters(model.device.index or 0), NEIGHBOURS, WARPS)


def kernel_text(model: DecoderLM, dtype: torch.dtype) -> str:
    """Return the source of the kernel for a model."""
    return library.source({**kernel_sizes(model, dtype, WARPS), **layout_for(model, dtype).macros})


class CudaDecoder:
    """The KV cache of one sequence of at most `capacity` tokens, and the kernel that extends it."""

    user: "weakref.ref[Any] | None" = None
    """The session that this belongs to."""

    def __init__(
        self,
        model: DecoderLM,
        capacity: int | None = None,
        clusters: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ):
        cfg = model.config
        reason = unsupported_config(cfg)
        if reason is not None:
            raise CudaDecodeError(f"{reason}: use engine='torch'.")
        assert isinstance(cfg, c.DecoderConfig)
        self.config, self.device, self.dtype = cfg, model.device, dtype
        self.capacity = min(capacity or cfg.max_len or 1024, cfg.max_len or (capacity or 1024))
        self.limit = cfg.max_len or 2**30
        self.layout = layout_for(model, dtype, clusters)
        self.sizes = {**kernel_sizes(model, dtype, WARPS), **self.layout.macros}
        self.text = library.source(self.sizes)
        self.position, self.tag = 0, 0
        self.tokens = torch.zeros(self.capacity + 1, dtype=torch.int32, device=self.device)
        self.logits = torch.zeros(cfg.vocab_size, device=self.device)
        self.given = {**self._buffers(), **position_tables(model, self.capacity)}
        self.head_scale = 1.0
        self.refresh(model)

    def _buffers(self) -> dict[str, Tensor]:
        cfg, m = self.config, self.layout.macros
        windows = [cfg.window(layer) or ENDLESS for layer in range(cfg.n_layers)]
        stored = (cfg.n_layers, cfg.n_kv_heads, self.capacity)
        lines = -(-(cfg.d_model // m["NEIGHBOURS"]) // 3)

        def new(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        return {
            "keys": new(*stored, cfg.d_head, dtype=self.dtype), "values": new(*stored, cfg.d_value, dtype=self.dtype),
            "weights": self.layout.empty(self.device),
            # (from heads or hidden units, 2 alternating sets, blocks, lines of 16 bytes); see heads.cuh
            "lines": new(2, 2, self.layout.blocks, lines, 4, dtype=torch.float32),
            "best": new(self.layout.blocks, 4, dtype=torch.float32),
            "windows": torch.tensor(windows, dtype=torch.int32, device=self.device),
        }  # fmt: skip

    def refresh(self, model: DecoderLM) -> None:
        """Copy the present weights of the model."""
        held = stacked_weights(model, self.dtype)
        fill(self.given["weights"], self.layout, held)
        self.given.update({name: held[name] for name in library.TENSORS if name in held})
        self.head_scale = held["head_scale"]

    def take(self, tokens: list[int], kept: list[tuple[Tensor, Tensor]]) -> None:
        """Take over a prompt that torch has read except for its last token: keys and values (G, S, K) per layer."""
        for layer, (k, v) in enumerate(kept):
            self.given["keys"][layer, :, : k.shape[1]] = k
            self.given["values"][layer, :, : v.shape[1]] = v
        self.tokens[: len(tokens)] = torch.tensor(tokens, dtype=torch.int32, device=self.device)
        self.position = len(tokens) - 1

    def greedy(self, count: int) -> Int[Tensor, "N"]:
        """Return the next `count` tokens, each the most likely, in one launch."""
        if self.position + count > self.capacity:
            raise CudaDecodeError(f"the cache holds {self.capacity} tokens: {count} more do not fit.")
        self._launch(count)
        start = self.position + 1
        self.position += count
        return self.tokens[start : start + count]

    def step(self, token: int | None = None) -> Float[Tensor, "V"]:
        """Return the logits after the last token. `token` replaces the most likely one that the kernel has written."""
        if token is not None:
            self.tokens[self.position] = token
        self.greedy(1)
        return self.logits

    def _launch(self, count: int) -> None:
        assert self.device.type == "cuda"
        ring = self.sizes["RING"] * self.sizes["STAGE"]
        kernel = nvrtc.kernel(self.text, "decode", self.device.index or 0, ring)
        kernel.launch(self.arguments(count), self.layout.blocks, 32 * (WARPS + 1), together=True, cluster=NEIGHBOURS)

    def arguments(self, count: int) -> library.Arguments:
        """Return the argument for `count` tokens from the present position. Every exchange has a new tag."""
        cfg, given = self.config, library.Arguments()
        held = {**self.given, "tokens": self.tokens, "logits": self.logits}
        for name in library.TENSORS:
            setattr(given, name, held[name].data_ptr())
        given.embed_scale, given.scale, given.head_scale = cfg.embedding.scale, cfg.scale, self.head_scale
        given.eps = getattr(cfg.norm, "eps", 1e-5)
        given.position, given.count, given.capacity, given.tag = self.position, count, self.capacity, self.tag
        self.tag = (self.tag + count * (2 * cfg.n_layers + 1)) % 2**31
        return given
