"""The launches of one decode step of a decoder-only model, built once and captured as a CUDA graph.

The residual stream is a float32 buffer that the branches add to. Each part of the model is a list of launches of the
fused kernels or, where they do not support it, a call of the engine's module on the norm of the stream.
"""

from collections.abc import Callable
from typing import Any, assert_never

import torch
from torch import Tensor, nn

from glassformer import config as c
from glassformer.kernels.cuda.graph import attend, parts
from glassformer.kernels.cuda.graph.cache import CapturedCache
from glassformer.kernels.cuda.graph.experts import expert_linear
from glassformer.kernels.cuda.graph.launches import STORED, WEIGHTS, Launch
from glassformer.kernels.cuda.graph.linear import (
    FEW,
    FUSED_NORM,
    UNDIVIDED,
    NormFactors,
    Operand,
    Shape,
    adds_to_stream,
    before_norm,
    library_matmul,
    linear,
    norm_factors,
    operand,
    ordered_argmax,
    suits,
)
from glassformer.kernels.cuda.graph.program import Program, make_program
from glassformer.model import DecoderLM
from glassformer.model.block import Block
from glassformer.model.context import NO_TAP, AttentionContext, forward_context
from glassformer.model.layers import Gated
from glassformer.model.moe import MoE
from glassformer.model.positions import Learned, Rotary, Sinusoidal, alibi_slopes, sinusoids

Operation = Launch | Callable[[], object]
"""A launch of a kernel, or a call of torch."""
ENDLESS = 2**30
"""The window of a layer without a window."""


class FusedStep:
    """One new token per sequence: `operations` read `tokens`, write `logits` and the most likely next `tokens`."""

    def __init__(self, model: DecoderLM, cache: CapturedCache, batch: int, precision: str, processors: int):
        cfg = model.config
        assert isinstance(cfg, c.DecoderConfig)
        self.config, self.cache, self.batch, self.precision = cfg, cache, batch, precision
        self.device, self.dtype, self.processors = model.device, next(model.parameters()).dtype, processors
        # the parts, not the model: captured steps must not keep a model alive
        self.embed, self.decoder, self.head = model.embed, model.decoder, model.head
        self.held = torch.bfloat16 if precision == "bfloat16" else torch.float16
        """The dtype of what the tensor cores multiply."""
        self.tokens = self.new(batch, dtype=torch.int32)
        self.history = self.new(batch, cache.slots + 1, dtype=torch.int32)
        self.best = self.new(batch, dtype=torch.int64)
        self.stream, self.branch = self.new(batch, cfg.d_model), self.new(batch, cfg.d_model)
        self.normed = self.new(batch, cfg.d_model, dtype=self.held)
        self.logits = self.new(batch, cfg.vocab_size)
        self.buffers: dict[tuple[str, int], Tensor] = {}
        self.context: list[AttentionContext] = []
        self.operations: list[Operation] = []
        self.program: Program | None = None
        """All operations as one launch."""
        self.is_program = batch == 1 and WEIGHTS[precision] > 0
        """A program is faster than a graph for one sequence and weights in 8 bits (docs/benchmarks_history.md)."""
        self.is_fused = {"attention": 0, "feedforward": 0}
        """Number of layers whose part the fused kernels compute."""
        self._build()

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def buffer(self, name: str, width: int, dtype: torch.dtype = torch.float32, rows: int = 0) -> Tensor:
        """Return a buffer (rows, width) that parts of all layers share."""
        if (name, width) not in self.buffers:
            self.buffers[name, width] = self.new(rows or self.batch, width, dtype=dtype)
        return self.buffers[name, width]

    def _build(self) -> None:
        stack: Any = self.decoder
        layers = list(enumerate(stack.layers))
        fused = [parts.attention_is_fused(self.config, block, layer, self.dtype) for layer, block in layers]
        if not all(fused):
            self.operations.append(self._read_context)
        self._embed()
        for layer, block in layers:
            self._block(layer, block, fused[layer])
        self._head()
        self._vector("choose", 1, slots=self.batch)
        if self.is_program:
            self.program = make_program(self.operations, self.cache.slots > attend.LONG, self.processors, self.device)

    def _block(self, layer: int, block: Any, fused: bool) -> None:
        """Append the operations of a block, in the order of its placement of norms."""
        self.is_fused["attention"] += fused

        def attend(norm: nn.Module | None, into: str) -> Callable[[], None]:
            return (
                self._attention(layer, block, norm, into) if fused else self._engine_attention(layer, block, norm, into)
            )

        def feed(norm: nn.Module | None, into: str) -> Callable[[], None]:
            return self._feedforward(layer, block, norm, into)

        has_feed = block.feedforward is not None
        match self.config.placement:
            case "pre":
                attend(block.norm_attention, "stream")()
                if has_feed:
                    feed(block.norm_feedforward, "stream")()
            case "parallel":
                finish = [attend(block.norm, "stream"), feed(block.norm, "stream")]
                [part() for part in finish]
            case "parallel_two":
                finish = [attend(block.norm_attention, "stream"), feed(block.norm_feedforward, "stream")]
                [part() for part in finish]
            case "after":
                attend(None, "branch")()
                self._add_norm(block.norm_attention, False)
                if has_feed:
                    feed(None, "branch")()
                    self._add_norm(block.norm_feedforward, False)
            case "sandwich":
                attend(block.norm_attention, "branch")()
                self._add_norm(block.norm_attention_out, False)
                if has_feed:
                    feed(block.norm_feedforward, "branch")()
                    self._add_norm(block.norm_feedforward_out, False)
            case "post":
                attend(None, "branch")()
                self._add_norm(block.norm_attention, True)
                if has_feed:
                    feed(None, "branch")()
                    self._add_norm(block.norm_feedforward, True)
            case _:
                assert_never(self.config.placement)

    def _embed(self) -> None:
        position: Any = self.decoder.position
        if "embedding" in parts.unsupported_parts(self.config, 0):
            self.operations.append(self._engine_embed)
            return
        table = None
        if isinstance(position, Learned):
            table = position.weight.detach()[position.offset :].float().contiguous()
        elif isinstance(position, Sinusoidal):
            rows = torch.arange(self.cache.slots, device=self.device)
            table = sinusoids(rows, self.config.d_model, position.spec).float()
        weight = self.embed.tokens.weight.detach()
        self._vector("embed", self.batch, table=weight, positions=table, scale=self.config.embedding.scale)

    def _engine_embed(self) -> None:
        x = self.embed(self.tokens[:, None].long())
        self.stream.copy_(self.decoder.add_positions(x, self.cache.positions_now())[:, 0])

    def _read_context(self) -> None:
        """Compute masks and positions of the engine's attention."""
        stack: Any = self.decoder
        x = self.normed[:, None].to(self.dtype)
        context = forward_context(
            x, stack.position, stack.windows, True, cache=self.cache, kinds=stack.kinds, score_bias=stack.score_bias
        )
        self.context = list(context.layers)

    def _vector(self, kernel: str, blocks: int, **given: Any) -> None:
        """Append a launch of a small kernel (vectors.cu)."""
        common = {
            "token": self.tokens, "next": self.tokens, "history": self.history, "slot": self.cache.slot,
            "start": self.cache.start, "stream": self.stream, "branch": self.branch, "normed": self.normed,
            "best": self.best, "scale": 1.0, "width": self.config.d_model, "columns": self.history.shape[1],
        }  # fmt: skip
        macros = {"STORED": STORED[self.dtype], "OPERAND_IS_BF16": int(self.held is torch.bfloat16)}
        self.operations.append(Launch("vectors", kernel, macros, {**common, **given}, blocks))

    def _norm_arguments(self, norm: NormFactors) -> dict[str, Any]:
        return {"weight": norm.weight, "bias": norm.bias, "eps": norm.eps, "centred": int(norm.kind == 2)}

    def _add_norm(self, module: nn.Module, is_last: bool) -> None:
        """stream += scale * norm(branch), or stream = norm(stream + scale * branch)."""
        given = {**self._norm_arguments(norm_factors(module)), "scale": self.config.residual_scale}
        self._vector("add_norm", self.batch, is_last=int(is_last), **given)

    def _read_stream(self, module: nn.Module | None, once: bool) -> tuple[Tensor, NormFactors | None, int]:
        """Return what a matmul reads, and the norm that it applies itself. Otherwise a launch before it applies it."""
        norm = norm_factors(module)
        if once and self.batch <= FUSED_NORM:
            return self.stream, norm, norm.kind
        last = self.operations[-1] if self.operations else None
        if once and self.batch <= FEW and norm.kind == 1 and isinstance(last, Launch) and adds_to_stream(last):
            self.operations[-1], measured = before_norm(last, norm, self.normed)
            return self.normed, measured, UNDIVIDED
        if norm.kind == 0:
            self.operations.append(lambda: self.normed.copy_(self.stream))
        else:
            self._vector("normalize", self.batch, **self._norm_arguments(norm))
        return self.normed, None, -1

    def _linear(
        self, x: Tensor, layers: list[Operand], out: str, into: Tensor, norm: NormFactors | None = None,
        kind: int = -1, activation: int | None = None, **more: Any,
    ) -> None:  # fmt: skip
        rows, columns = tuple(m.weight.shape[0] for m in layers), layers[0].weight.shape[1]
        shape = Shape(self.batch, rows, columns, out, self.precision, activation, kind)
        if shape.plan(self.processors) is None:
            assert norm is None
            self.operations.append(library_matmul(x, layers, out, into, activation, more))
        else:
            self.operations.append(linear(x, layers, shape, into, self.processors, norm, **more))

    def _operands(self, *layers: nn.Linear) -> list[Operand]:
        return [operand(layer.weight, layer.bias, self.precision) for layer in layers]

    def _finish(self, x: Tensor, layer: nn.Linear, into: str) -> None:
        """Append the matmul that ends a branch: added to the stream, or written to `branch`."""
        if into == "stream":
            self._linear(x, self._operands(layer), "add", self.stream, factor=self.config.residual_scale)
        else:
            self._linear(x, self._operands(layer), "float", self.branch)

    def _attention(self, layer: int, block: Block, norm: nn.Module | None, into: str) -> Callable[[], None]:
        """Append projections; return what appends attention itself and the output projection."""
        cfg, module = self.config, block.attention
        H, G, K, U = cfg.n_heads, cfg.n_kv_heads, cfg.d_head, cfg.d_value
        qkv = self.buffer("qkv", H * K + G * K + G * U)
        mixed = self.buffer("mixed", H * U, self.held)
        x, factors, kind = self._read_stream(norm, once=True)
        self._linear(x, self._operands(module.q, module.k, module.v), "float", qkv, factors, kind)

        def finish() -> None:
            self.operations.append(self._attend(layer, block, qkv, mixed))
            self._finish(mixed, module.o, into)

        return finish

    def _attend(self, layer: int, block: Block, qkv: Tensor, mixed: Tensor) -> Launch:
        cfg, module = self.config, block.attention
        stored: Any = self.cache.layers[layer]
        H, spec = cfg.n_heads, cfg.attention
        tensor_cores = self.dtype.itemsize == 2 and not self.is_program
        shape = {"H": H, "G": cfg.n_kv_heads, "K": cfg.d_head, "U": cfg.d_value}
        q, k = norm_factors(module.q_norm), norm_factors(module.k_norm)
        scheme: Any = self.decoder.scheme(layer)
        waves = self._waves(scheme) if isinstance(scheme, Rotary) else (None, None)
        slopes = None
        if isinstance(cfg.layer_position(layer), c.Alibi):
            slopes = torch.tensor(alibi_slopes(H), device=self.device) * scheme.spec.scale
        macros = {
            "STORED": STORED[self.dtype], "OPERAND_IS_BF16": int(self.held is torch.bfloat16), **shape,
            **attend.distribution(shape, self.batch, self.cache.slots, tensor_cores, self.processors),
            "ROTATED": scheme.d_rotated if isinstance(scheme, Rotary) else 0,
            "HALVES": int(isinstance(scheme, Rotary) and scheme.spec.pairing == "halves"), "QK_NORM": q.kind,
            "NORM_OVER": ("head", "heads", "all").index(spec.qk_norm_over),
            "NORM_LAST": int(spec.qk_norm_after_rotation),
        }  # fmt: skip
        given = {
            "qkv": qkv, "out": mixed, "keys": stored.k, "values": stored.v, "slot": self.cache.slot,
            "start": self.cache.start, "q_weight": q.weight, "q_bias": q.bias, "k_weight": k.weight, "k_bias": k.bias,
            "eps": q.eps, "cosines": waves[0], "sines": waves[1], "slopes": slopes,
            "sinks": None if module.sinks is None else module.sinks.detach().float(), "scale": cfg.scale,
            "softcap": spec.softcap or 0.0, "clip": spec.clip or 0.0, "capacity": self.cache.slots,
            "window": cfg.window(layer) or ENDLESS,
        }  # fmt: skip
        splits, blocks = macros["SPLITS"], self.batch * H // macros["HEADS"] * macros["SPLITS"]
        return Launch("attend", "attend", macros, given, blocks, splits, macros["DYNAMIC_BYTES"])

    def _waves(self, scheme: Rotary) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of every slot; layers with the same scheme share them."""
        key = ("cosines", id(scheme))
        if key not in self.buffers:
            cos, sin = scheme.table(torch.arange(self.cache.slots, device=self.device), torch.float32)
            self.buffers[key], self.buffers["sines", id(scheme)] = cos.contiguous(), sin.contiguous()
        return self.buffers[key], self.buffers["sines", id(scheme)]

    def _engine_input(self, norm: nn.Module | None) -> Tensor:
        """Append the norm of the stream and return the buffer that the engine's modules read, (B, D)."""
        x, _, _ = self._read_stream(norm, once=False)
        return x

    def _engine_attention(self, layer: int, block: Block, norm: nn.Module | None, into: str) -> Callable[[], None]:
        x = self._engine_input(norm)
        y = self.buffer("attended", self.config.d_model, self.dtype)

        def compute() -> None:
            y.copy_(block.attention(x[:, None].to(self.dtype), self.context[layer])[:, 0])

        self.operations.append(compute)
        return lambda: self._engine_output(y, into)

    def _engine_output(self, y: Tensor, into: str) -> None:
        if into == "stream":
            self.operations.append(lambda: self.stream.add_(y, alpha=self.config.residual_scale))
        else:
            self.operations.append(lambda: self.branch.copy_(y))

    def _feedforward(self, layer: int, block: Block, norm: nn.Module | None, into: str) -> Callable[[], None]:
        """Append the first matmul of the feed-forward; return what appends the rest."""
        module: Any = block.feedforward
        fused = parts.feedforward_is_fused(self.config, block, layer, self.dtype)
        self.is_fused["feedforward"] += fused
        spec = self.config.layer_feedforward(layer)
        if fused and isinstance(spec, c.MoE):
            return self._experts(module, spec, norm, into)
        if not fused:
            x, y = self._engine_input(norm), self.buffer("fed", self.config.d_model, self.dtype)
            self.operations.append(lambda: y.copy_(module(x.to(self.dtype), NO_TAP)))
            return lambda: self._engine_output(y, into)
        assert isinstance(spec, c.Dense | c.Gated)
        hidden = self.buffer("hidden", spec.d_ff, self.held)
        x, factors, kind = self._read_stream(norm, once=True)
        layers = self._operands(module.gate, module.up) if isinstance(module, Gated) else self._operands(module.up)
        limits: dict[str, Any] = _limits(spec)
        self._linear(x, layers, _first_half(spec), hidden, factors, kind, parts.activation_number(spec), **limits)
        return lambda: self._finish(hidden, module.down, into)

    def _experts(self, module: MoE, spec: c.MoE, norm: nn.Module | None, into: str) -> Callable[[], None]:
        """A mixture of experts: torch chooses them, the kernels compute each pair of a vector and an expert."""
        unit, A, batch = spec.expert, spec.n_active, self.batch
        x = self._engine_input(norm)
        choice, gates = self.new(batch, A, dtype=torch.int64), self.new(batch, A)
        shared = self.buffer("shared", self.config.d_model, self.dtype)

        def route() -> None:
            given = x.to(self.dtype)
            weight, chosen = module.router.choose(module.router.scores(given), A)
            weight = weight / weight.sum(-1, keepdim=True) if module.normalize else weight
            gates.copy_(weight * module.scale)
            choice.copy_(chosen)
            if module.shared is not None:
                shared.copy_(module.share(given))

        self.operations.append(route)
        hidden = self.buffer("hidden of experts", unit.d_ff, self.held, batch * A)
        outputs = self.buffer("outputs of experts", self.config.d_model, rows=batch * A)
        experts: list[Any] = list(module.experts)
        first = [[e.gate, e.up] if isinstance(e, Gated) else [e.up] for e in experts]
        rows = (unit.d_ff,) * len(first[0])
        shape = Shape(
            1, rows, x.shape[1], _first_half(unit), self.precision, parts.activation_number(unit), experts=True
        )
        made = [self._operands(*layers) for layers in first]
        self.operations.append(expert_linear(x, made, shape, hidden, choice, self.processors, slots=A, **_limits(unit)))
        shape = Shape(1, (self.config.d_model,), unit.d_ff, "float", self.precision, experts=True)
        made = [self._operands(e.down) for e in experts]
        self.operations.append(expert_linear(hidden, made, shape, outputs, choice, self.processors, slots=1))

        def finish() -> None:
            if module.shared is not None:
                self._engine_output(shared, into)
            elif into == "branch":
                self.operations.append(lambda: self.branch.zero_())
            target = self.stream if into == "stream" else self.branch
            scale = self.config.residual_scale if into == "stream" else 1.0
            given = {"gates": gates, "experts": outputs, "slots": A, "scale": scale, "stream": target}
            self._vector("add_experts", batch, **given)

        return finish

    def _head(self) -> None:
        head: Any = self.head
        if "head" in parts.unsupported_parts(self.config, 0) or not self._head_suits():
            x = self._engine_input(self.decoder.norm)

            def compute() -> None:
                self.logits.copy_(head(x[:, None].to(self.dtype), self.embed.tokens.weight)[:, 0])
                self.best.copy_(ordered_argmax(self.logits))

            self.operations.append(compute)
            return
        matrix = self.embed.tokens.weight if head.weight is None else head.weight
        x, norm, kind = self._read_stream(self.decoder.norm, once=True)
        given = {"best": self.best, "factor": head.scale, "softcap": head.softcap or 0.0}
        if head.bias is not None and head.scale != 1:  # the kernel adds the bias before the factor
            layers = [operand(matrix, head.bias / head.scale, self.precision)]
        else:
            layers = [operand(matrix, head.bias, self.precision)]
        self._linear(x, layers, "logits", self.logits, norm, kind, **given)

    def _head_suits(self) -> bool:
        head: Any = self.head
        matrix = self.embed.tokens.weight if head.weight is None else head.weight
        layer = nn.Linear(1, 1, bias=False, device="meta")
        layer.weight = nn.Parameter(matrix, requires_grad=False)
        return suits(layer, self.dtype)


def _first_half(spec: c.Dense | c.Gated) -> str:
    return "gated" if isinstance(spec, c.Gated) else "activation"


def _limits(spec: c.Dense | c.Gated) -> dict[str, float]:
    return {"limit": spec.limit or 0.0, "up_offset": spec.up_offset} if isinstance(spec, c.Gated) else {}
