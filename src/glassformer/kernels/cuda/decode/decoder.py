"""One sequence on a GPU: the weights in the layout of the persistent kernel, the KV cache, and the launches."""

import ctypes
import weakref
from functools import cache
from typing import Any

import torch
from torch import Tensor

from glassformer import config as c
from glassformer.kernels.cuda.decode.pack import ENDLESS, kernel_sizes, position_tables, source, stacked_weights
from glassformer.kernels.cuda.decode.stream import MEMORY, Layout, fill
from glassformer.kernels.toolchain import nvrtc
from glassformer.model import DecoderLM
from glassformer.model.cache import Cache
from glassformer.shapes import Float, Int

WARPS = 15
"""Warps of 32 threads in each block that compute; one more warp fetches weights."""
NEIGHBOURS = 8
"""Blocks of a cluster: 8 is the largest portable cluster size."""
PARTS = ("cluster.cuh", "stream.cuh", "heads.cuh", "decode.cu")
TENSORS = (
    "tokens", "windows", "weights", "table", "position_table", "cosines", "sines", "norm_a", "norm_a_bias", "norm_f",
    "norm_f_bias", "last_norm", "last_norm_bias", "b_out", "b_down", "keys", "values", "lines", "best", "logits",
)  # fmt: skip
"""The pointers of `struct Arguments` (heads.cuh), in order."""
PROBE = 'extern "C" __global__ void probe(int) {}'


class Arguments(ctypes.Structure):
    """The argument of the kernel, passed by value."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in TENSORS),
        *((name, ctypes.c_float) for name in ("embed_scale", "scale", "head_scale", "eps")),
        *((name, ctypes.c_int32) for name in ("position", "count", "capacity")),
        ("tag", ctypes.c_uint32),
    ]


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


class CudaDecoder:
    """The KV cache of one sequence of at most `capacity` tokens, and the kernel that extends it."""

    user: "weakref.ref[Any] | None" = None
    """The generation that this belongs to."""

    def __init__(self, model: DecoderLM, sequences: int, capacity: int, dtype: torch.dtype):
        cfg = model.config
        assert isinstance(cfg, c.DecoderConfig)
        assert sequences == 1
        self.config, self.device, self.dtype, self.capacity = cfg, model.device, dtype, capacity
        self.layout = Layout(cfg, dtype, _clusters(model.device.index or 0), NEIGHBOURS, WARPS)
        self.sizes = {**kernel_sizes(model, dtype, WARPS), **self.layout.macros}
        self.text = source(self.sizes, PARTS)
        self.position, self.tag = 0, 0
        self.tokens = torch.zeros(capacity + 1, dtype=torch.int32, device=self.device)
        self.logits = torch.zeros(cfg.vocab_size, device=self.device)
        held = stacked_weights(model, dtype)
        self.given = {**self._buffers(), **position_tables(model, capacity)}
        self.given |= {name: held[name] for name in TENSORS if name in held}
        fill(self.given["weights"], self.layout, held)
        self.head_scale = held["head_scale"]

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

    def take(self, filled: Cache) -> None:
        """Continue from what the cache of a prompt holds."""
        layers: list[Any] = list(filled.layers)
        for number, layer in enumerate(layers):
            for name, held in (("keys", layer.k), ("values", layer.v)):
                self.given[name][number, :, : filled.length] = held[0, :, : filled.length]
        self.position = filled.length

    def step(self, tokens: Int[Tensor, "1"]) -> Float[Tensor, "1 V"]:
        """Return the logits after one more token."""
        self._run(tokens, 1)
        return self.logits[None].clone()

    def greedy(self, tokens: Int[Tensor, "1"], count: int) -> tuple[Int[Tensor, "N 1"], Float[Tensor, "1 V"]]:
        """Return the `count` tokens after the given one, each the most likely, and the last logits. One launch."""
        self._run(tokens, count)
        return self.tokens[self.position + 1 - count : self.position + 1, None], self.logits[None]

    def reorder(self, parents: Int[Tensor, "N"]) -> None:
        raise NotImplementedError  # the registry refuses beam search

    def _run(self, tokens: Int[Tensor, "1"], count: int) -> None:
        assert self.position + count <= self.capacity
        self.tokens[self.position] = tokens[0]
        self._launch(count)
        self.position += count

    def _launch(self, count: int) -> None:
        ring = self.sizes["RING"] * self.sizes["STAGE"]
        kernel = nvrtc.kernel(self.text, "decode", self.device.index or 0, ring)
        kernel.launch(self.arguments(count), self.layout.blocks, 32 * (WARPS + 1), together=True, cluster=NEIGHBOURS)

    def arguments(self, count: int) -> Arguments:
        """Return the argument for `count` tokens from the present position. Every exchange has a new tag."""
        cfg, given = self.config, Arguments()
        held = {**self.given, "tokens": self.tokens, "logits": self.logits}
        for name in TENSORS:
            setattr(given, name, held[name].data_ptr())
        given.embed_scale, given.scale, given.head_scale = cfg.embedding.scale, cfg.scale, self.head_scale
        given.eps = getattr(cfg.norm, "eps", 1e-5)
        given.position, given.count, given.capacity, given.tag = self.position, count, self.capacity, self.tag
        self.tag = (self.tag + count * (2 * cfg.n_layers + 1)) % 2**31
        return given
