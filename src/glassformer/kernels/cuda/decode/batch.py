"""Many sequences on a GPU: a step is one CUDA graph of matmuls, with three kernels of our own between them."""

import ctypes
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer import config as c
from glassformer.kernels.cuda.decode.pack import ENDLESS, kernel_sizes, position_tables, source, stacked_weights
from glassformer.kernels.toolchain import nvrtc
from glassformer.model import DecoderLM
from glassformer.model.cache import Cache
from glassformer.model.layers import ACTIVATIONS
from glassformer.shapes import Float, Int

WARPS = {"advance": 24, "attend": 4, "choose": 32}
"""Warps of 32 threads in a block of each kernel."""
SHARES = {"w_out": 1, "w_down": 4}
"""Split-K: partial sums of a matmul that stay separate: `advance` adds them as it reads them."""
TENSORS = (
    "tokens", "lengths", "history", "table", "delta", "qkv", "logits", "position_table", "cosines", "sines", "weight",
    "bias", "delta_bias", "stream", "normed", "keys", "values", "mixed",
)  # fmt: skip


class Arguments(ctypes.Structure):
    """The argument of all three kernels; mirrors the struct of batch.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in TENSORS),
        *((name, ctypes.c_float) for name in ("embed_scale", "factor", "scale", "eps")),
        *((name, ctypes.c_int32) for name in ("rows", "capacity", "window", "shares")),
    ]


def batch_sizes(model: DecoderLM, dtype: torch.dtype, kernel: str) -> dict[str, int]:
    """Return the macros that a kernel is compiled with."""
    columns = -(-model.config.vocab_size // 8) * 8  # rows of 50,257 would not be aligned for matmuls and 16-byte loads
    return {**kernel_sizes(model, dtype, WARPS[kernel]), "COLUMNS": columns}


class CudaBatch:
    """The KV caches of `rows` sequences of at most `capacity` tokens, and the step that extends them together."""

    user: "weakref.ref[Any] | None" = None
    """The generation that this belongs to."""

    def __init__(self, model: DecoderLM, rows: int, capacity: int, dtype: torch.dtype):
        cfg = model.config
        assert isinstance(cfg, c.DecoderConfig)
        self.config, self.device, self.rows, self.dtype, self.capacity = cfg, model.device, rows, dtype, capacity
        self.held = {**stacked_weights(model, dtype), **position_tables(model, capacity)}
        self.sizes = batch_sizes(model, dtype, "attend")
        biases = ("b_qkv", "b_up") if self.sizes["BIASED"] else ()
        self.biases = {name: self.held[name].to(dtype) for name in biases}
        spare = self.sizes["COLUMNS"] - cfg.vocab_size
        self.head = F.pad(self.held["head"], (0, 0, 0, spare))
        has_bias = model.head is not None and model.head.bias is not None
        self.head_bias = F.pad(self.held["head_bias"], (0, spare)).to(dtype) if has_bias else None
        sizes = {name: batch_sizes(model, dtype, name) for name in WARPS}
        self.texts = {name: source(sizes[name], ("batch.cu",)) for name in WARPS}
        stored = (cfg.n_layers, rows, cfg.n_kv_heads, self.capacity)

        def new(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=self.device)

        self.keys, self.values = new(*stored, cfg.d_head), new(*stored, cfg.d_value)
        self.tokens, self.lengths = new(rows, kind=torch.int32), new(rows, kind=torch.int32)
        self.stream, self.normed = new(rows, cfg.d_model, kind=torch.float32), new(rows, cfg.d_model)
        self.mixed = new(rows, cfg.n_heads * cfg.d_value)
        self.logits = new(rows, self.sizes["COLUMNS"])
        self.history = new(rows, self.capacity + 1, kind=torch.int32)
        self.graph: torch.cuda.CUDAGraph | None = None

    def take(self, filled: Cache) -> None:
        """Continue from what the cache of prompts holds. They are padded on the left there, and not here."""
        layers: list[Any] = list(filled.layers)
        padding = [0] * self.rows if filled.real is None else (~filled.real).sum(1).tolist()
        for first in set(padding):
            rows = [row for row, skipped in enumerate(padding) if skipped == first]
            length = filled.length - first
            for number, layer in enumerate(layers):
                self.keys[number, rows, :, :length] = layer.k[rows, :, first : filled.length].to(self.dtype)
                self.values[number, rows, :, :length] = layer.v[rows, :, first : filled.length].to(self.dtype)
            self.lengths[rows] = length

    def step(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        """Return the logits after one more token per sequence."""
        self.tokens.copy_(tokens)
        self._run()
        return self.logits[:, : self.config.vocab_size].float()

    def greedy(self, tokens: Int[Tensor, "B"], count: int) -> tuple[Int[Tensor, "N B"], Float[Tensor, "B V"]]:
        """Return the `count` tokens after the given ones, each the most likely, and the last logits."""
        self.tokens.copy_(tokens)
        at = self.lengths[:, None].long() + torch.arange(1, count + 1, device=self.device)
        for _ in range(count):  # nothing waits for the GPU
            self._run()
        return self.history.gather(1, at).T, self.logits[:, : self.config.vocab_size]

    def reorder(self, parents: Int[Tensor, "N"]) -> None:
        raise NotImplementedError  # the registry refuses beam search

    @torch.no_grad()
    def _run(self) -> None:
        if self.graph is None:
            self._capture()
        assert self.graph is not None
        self.graph.replay()

    def _capture(self) -> None:
        tokens, lengths = self.tokens.clone(), self.lengths.clone()
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):  # before the capture: compile, choose algorithms, allocate workspaces
            self._body()
        torch.cuda.current_stream(self.device).wait_stream(side)
        self.tokens.copy_(tokens)
        self.lengths.copy_(lengths)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._body()

    def _body(self) -> None:
        """Launch the kernels of a step. Python runs this only while the graph is captured."""
        cfg, h = self.config, self.held
        self._advance(None, None, h["norm_a"][0], h["norm_a_bias"][0])
        for layer in range(cfg.n_layers):
            qkv = self._linear(self.normed, h["w_qkv"][layer], "b_qkv", layer)
            window = cfg.window(layer) or ENDLESS
            caches = {"keys": self.keys[layer], "values": self.values[layer]}
            self._launch("attend", self.rows * cfg.n_heads, qkv=qkv, window=window, **caches)
            mixed = self._split_linear(self.mixed, "w_out", layer)
            self._advance(mixed, h["b_out"][layer], h["norm_f"][layer], h["norm_f_bias"][layer])
            fed = self._split_linear(self._hidden(layer), "w_down", layer)
            last = layer + 1 == cfg.n_layers
            names = ("last_norm", "last_norm_bias") if last else ("norm_a", "norm_a_bias")
            weight, bias = (h[name] if last else h[name][layer + 1] for name in names)
            self._advance(fed, h["b_down"][layer], weight, bias, h["head_scale"] if last else 1.0)
        self.logits = F.linear(self.normed, self.head, self.head_bias)
        self._launch("choose", self.rows)

    def _linear(self, x: Tensor, weight: Tensor, bias: str, layer: int) -> Tensor:
        return F.linear(x, weight, self.biases[bias][layer] if self.biases else None)

    def _split_linear(self, x: Tensor, name: str, layer: int) -> Float[Tensor, "N B D"]:
        """Return a matmul without its bias as N partial sums over slices of the inner dimension."""
        weight = self.held[name][layer]
        shares = next(n for n in (SHARES[name], 2, 1) if weight.shape[1] % (8 * n) == 0)
        if shares == 1:
            return F.linear(x, weight)[None]
        x, weight = (t.unflatten(-1, (shares, -1)) for t in (x, weight))
        return torch.bmm(x.transpose(0, 1), weight.permute(1, 2, 0))

    def _hidden(self, layer: int) -> Tensor:
        feed, weight = self.config.feedforward, self.held["w_up"][layer]
        assert isinstance(feed, c.Dense | c.Gated)
        if isinstance(feed, c.Gated):
            up, gate = self._linear(self.normed, weight, "b_up", layer).chunk(2, -1)
            return ACTIVATIONS[feed.activation](gate) * up
        if feed.activation == "gelu_tanh" and self.biases and self.device.type == "cuda":
            # the GELU of cuBLAS is the tanh approximation
            fused: Tensor = torch._addmm_activation(self.biases["b_up"][layer], self.normed, weight.T, use_gelu=True)
            return fused
        return ACTIVATIONS[feed.activation](self._linear(self.normed, weight, "b_up", layer))

    def _advance(
        self, delta: Tensor | None, shift: Tensor | None, weight: Tensor, bias: Tensor, factor: float = 1.0
    ) -> None:
        moved = {"delta": delta, "delta_bias": shift, "shares": 1 if delta is None else len(delta)}
        self._launch("advance", self.rows, weight=weight, bias=bias, factor=factor, **moved)

    def _launch(self, name: str, blocks: int, **changes: Any) -> None:
        kernel = nvrtc.kernel(self.texts[name], name, self.device.index or 0)
        kernel.launch(self.arguments(**changes), blocks, 32 * WARPS[name])

    def arguments(self, **changes: Any) -> Arguments:
        """Return the argument of a kernel. Without a delta, `advance` starts from the embedding."""
        cfg, given = self.config, Arguments()
        own = ("tokens", "lengths", "history", "logits", "stream", "normed", "mixed")
        held = {**self.held, **{name: getattr(self, name) for name in own}}
        for name in TENSORS:
            tensor = changes.get(name, held.get(name))
            setattr(given, name, None if tensor is None else tensor.data_ptr())
        given.embed_scale, given.factor, given.scale = cfg.embedding.scale, changes.get("factor", 1.0), cfg.scale
        given.eps, given.capacity = getattr(cfg.norm, "eps", 1e-5), self.capacity
        given.rows, given.window, given.shares = self.rows, changes.get("window", ENDLESS), changes.get("shares", 1)
        return given
