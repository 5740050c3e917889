"""How training steps compute the blocks of a model: compiled by torch.compile, or with activations computed again.

Both are applied from outside: the forward of each block is wrapped.

A whole step compiles in time proportional to the number of layers, almost a minute for a model of 24. Here the compiled
function is one block, whose parameters are inputs, so it is compiled once whatever the number of layers. The last norm
and the loss are compiled as well; the little that is left runs in plain torch. The compiled block receives what its own
layer uses, and not the layer's number, which torch.compile would treat as a constant. Evaluation and forward passes
with a KV cache or a recording tap are not compiled. In a run of hours on a GPU (`LONG`) the whole step is
compiled.

Recomputation (activation checkpointing) gives the same numbers with less memory in more time:

    full        only the input of each block is saved; its forward pass runs again in the backward pass
    selective   the results of matmuls and of attention are saved as well; norms, activation functions, rotations and
                dropout run again, which costs little

Dropout draws the same numbers again. A tap is called twice; the balance loss of experts is read before the backward
pass, so that it counts once.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from glassformer.config.choices import Recompute
from glassformer.model import Model
from glassformer.model.block import Block, Stack
from glassformer.model.context import NO_TAP, ForwardContext, Tap, innermost
from glassformer.sizing import count
from glassformer.training.objective import Routers, head_loss
from glassformer.training.run import Run

LONG = 3e18
"""Operations of a run, forward and backward, from which on a step is compiled as a whole. It takes up to a minute
longer to compile, and steps are 2 to 3 % faster, because the end of a block and the start of the next are computed
together. At 400 TFLOP/s, 3e18 operations take two hours."""
KINDS = 64
"""Kinds of blocks that may be compiled: different parts, masks, shapes of a batch. torch's own limit is 8."""

ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
MATMULS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm")
SAVED = {getattr(torch.ops.aten, name).default for name in (*ATTENTION, *MATMULS) if hasattr(torch.ops.aten, name)}
"""Operations whose results `selective` saves: matmuls, and attention on every kind of device."""


@dataclass(frozen=True)
class Again:
    """Calls a function whose activations are computed again in the backward pass, as far as `kind` says."""

    kind: Literal["selective", "full"]
    draws: bool
    """True if the function draws random numbers, which must be the same the second time."""

    def __call__(self, forward: Callable[..., Tensor], *given: Any) -> Tensor:
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": self.draws}
        if self.kind == "selective":
            options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
        out: Tensor = checkpoint(forward, *given, **options)
        return out


def again_options(model: Model, kind: Recompute) -> Again | None:
    """Return how blocks are computed again; None if nothing is."""
    return None if kind == "no" else Again(kind, model.config.dropout > 0)


def prepare_blocks(
    model: Model, function: Callable[..., tuple[Tensor, Tensor]], run: Run, compiled: bool, sharded: bool
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Wrap the blocks of a model as the run asks for; return `summed_loss`, which `function` is, compiled or not."""
    recompute, whole = run.machine.recompute, is_long(run) and not sharded
    if compiled:
        _keep_compiled()
    if compiled and not whole:
        compile_blocks(model, recompute)
        return functools.partial(function, finish=compiled_finish())
    recompute_blocks(model, recompute)
    return torch.compile(function) if compiled else function


def _keep_compiled() -> None:
    """Let later processes use all compiled functions again. By default torch compiles two kinds anew in each process.

    Functions that contain an autograd function: its forward and backward graphs are part of the key under which torch
    keeps the result. Functions that switch autocast off (the loss): so are the arguments of both calls.
    """
    import torch._functorch.config as settings
    import torch._inductor.config as inductor

    if hasattr(settings, "autograd_cache_allow_custom_autograd_functions"):
        settings.autograd_cache_allow_custom_autograd_functions = True
    if hasattr(inductor, "unsafe_marked_cacheable_functions"):
        calls = {f"torch.amp.autocast_mode.{name}": "arguments" for name in ("_enter_autocast", "_exit_autocast")}
        inductor.unsafe_marked_cacheable_functions = inductor.unsafe_marked_cacheable_functions | calls


def is_long(run: Run) -> bool:
    """Return whether a run is so long that compiling the whole step pays: 6 operations per parameter and token."""
    tokens = run.loop.steps * run.loop.batch * run.context
    return 6.0 * count(run.model) * tokens >= LONG


def compile_blocks(model: Model, recompute: Recompute = "no") -> None:
    """Wrap the forward of each block and of the last norms, so that training steps use torch.compile for them."""
    dynamo: Any = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, KINDS)
    again = again_options(model, recompute)
    for module in list(model.modules()):
        if isinstance(module, Block):
            module.forward = functools.partial(_forward, module, again)
        elif isinstance(module, Stack) and module.norm is not None:
            last: Any = module.norm
            last.forward = functools.partial(_norm, last)


def compiled_finish() -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the compiled loss of hidden states, for `summed_loss`. In evaluation it is not compiled."""
    compiled = _compiled(head_loss)

    def finish(model: Model, hidden: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        function = compiled if model.training and torch.is_grad_enabled() else head_loss
        found: tuple[Tensor, Tensor] = function(model, hidden, *given)
        return found

    return finish


def _norm(norm: Any, x: Tensor) -> Tensor:
    forward = type(norm).forward
    out: Tensor = (_compiled(forward) if norm.training and torch.is_grad_enabled() else forward)(norm, x)
    return out


def _forward(
    block: Block, again: Again | None, x: Tensor, context: ForwardContext, layer: int, tap: Tap = NO_TAP
) -> Tensor:
    inner = innermost(tap)
    known = inner is NO_TAP or isinstance(inner, Routers)
    if not (known and block.training and torch.is_grad_enabled()) or context.cache is not None:
        plain: Tensor = type(block).forward(block, x, context, layer, tap)
        return plain
    alone = dataclasses.replace(context, layers=(context.layers[layer],))
    out, losses = _compiled(_run)(block, again, x, alone, isinstance(inner, Routers))
    if isinstance(inner, Routers):
        inner.losses += losses
    return out


@functools.cache
def _compiled(function: Callable[..., Any]) -> Any:
    return torch.compile(function)


def _run(
    block: Block, again: Again | None, x: Tensor, context: ForwardContext, routed: bool
) -> tuple[Tensor, list[Tensor]]:
    """The output of a block that is the only layer of its context, and the balance loss of its router."""
    routers = Routers()
    tap: Tap = routers if routed else NO_TAP
    forward = functools.partial(type(block).forward, block)
    out = forward(x, context, 0, tap) if again is None else again(forward, x, context, 0, tap)
    return out, routers.losses


def recompute_blocks(model: Model, kind: Recompute) -> None:
    """Wrap the forward of each block, so that it runs again in the backward pass."""
    again = again_options(model, kind)
    if again is None:
        return
    for block in [module for module in model.modules() if isinstance(module, Block)]:
        block.forward = functools.partial(_recompute, block.forward, again)


def _recompute(forward: Callable[..., Tensor], again: Again, *given: Any) -> Tensor:
    return again(forward, *given) if torch.is_grad_enabled() else forward(*given)


def _policy(context: Any, operation: Any, *given: Any, **named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in SAVED else CheckpointPolicy.PREFER_RECOMPUTE
