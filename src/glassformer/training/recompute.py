"""Recomputation of activations (activation checkpointing): memory for time, with the same numbers.

    full        only the input of each block is saved; its forward pass runs again in the backward pass
    selective   the results of matmuls and of attention are saved as well; norms, activation functions, rotations and
                dropout run again, which costs little

It is applied from outside: the forward of each block is wrapped. Dropout draws the same numbers again. A tap is called
twice; the balance loss of experts is read before the backward pass, so that it counts once.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from glassformer.config.choices import Recompute
from glassformer.model import Model
from glassformer.model.block import Block

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


def recompute_blocks(model: Model, kind: Recompute) -> None:
    """Wrap the forward of each block, so that it runs again in the backward pass."""
    if kind == "no":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": model.config.dropout > 0}
    if kind == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    for block in [module for module in model.modules() if isinstance(module, Block)]:
        block.forward = functools.partial(_again, block.forward, options)


def _again(forward: Callable[..., Tensor], options: dict[str, Any], *given: Any) -> Tensor:
    if not torch.is_grad_enabled():
        return forward(*given)
    out: Tensor = checkpoint(forward, *given, **options)
    return out


def _policy(context: Any, operation: Any, *given: Any, **named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in SAVED else CheckpointPolicy.PREFER_RECOMPUTE
