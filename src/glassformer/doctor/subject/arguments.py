"""Values for arguments that a model requires beyond its tokens: positions, masks, lengths, flags.

A filler makes the value for one call from its tokens and from how many tokens came before. Which of several fillers a
model wants is found by trying (adapt.py). An argument whose name says nothing is not guessed.
"""

import contextlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from glassformer.shapes import Int

Filler = Callable[[Int[Tensor, "B T"], int], Any]

STARTS = ("start_pos", "start", "offset", "pos_offset", "start_position", "past_length", "past_len", "cache_len")
POSITIONS = ("input_pos", "position_ids", "positions", "pos", "position", "pos_ids", "cache_position", "pos_idx")
ADDRESSES = (*STARTS, "input_pos", "cache_position")
"""Arguments that give the positions of the new tokens to a model that keeps its cache itself."""
ZEROS = ("token_type_ids", "segment_ids", "type_ids", "segments", "doc_ids", "document_ids", "task_ids")
FLAGS = ("training", "train", "is_training", "deterministic", "causal", "is_causal")
LENGTHS = ("lengths", "seq_lens", "seq_lengths", "input_lengths", "lens")
SIZES = ("seq_len", "seqlen", "seq_length", "length")
SETUPS = ("setup_caches", "setup_cache", "set_kv_cache", "setup_kv_cache", "init_kv_cache", "init_kv_caches")
RESETS = re.compile(
    r"^(reset|clear|empty|flush|drop)_?(all_)?(kv|k_v|attn|attention|decode|decoding)?_?(cache|state|kv)s?$"
)
"""Methods that make caches for a batch size, and names of methods that empty them."""


@dataclass
class InternalCache:
    """A cache that the model keeps itself: all that the caller holds is how many tokens it has read."""

    length: int = 0


@dataclass
class InferenceParams:
    """The cache of `mamba_ssm` and of `flash_attn`: the model fills a dictionary, and the caller counts the tokens."""

    max_seqlen: int = 256
    max_batch_size: int = 8
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict[Any, Any] = field(default_factory=dict)
    lengths_per_sample: Tensor | None = None


def _causal(tokens: Tensor, start: int) -> Tensor:
    """True where query i may see key j: (T, start + T)."""
    length = tokens.shape[1]
    return torch.ones(length, start + length, dtype=torch.bool, device=tokens.device).tril(start)


def _additive(tokens: Tensor, start: int) -> Tensor:
    visible = _causal(tokens, start)
    return torch.zeros(visible.shape, device=tokens.device).masked_fill(~visible, -torch.inf)


def _block_mask(tokens: Tensor, start: int) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    length = tokens.shape[1]

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query + start >= key

    return create_block_mask(visible, None, None, length, start + length, device=str(tokens.device))


def _real(tokens: Tensor, start: int) -> Tensor:
    return torch.ones(tokens.shape[0], start + tokens.shape[1], dtype=torch.bool, device=tokens.device)


MASKS: tuple[Filler, ...] = (
    lambda t, start: None,
    _real,
    lambda t, start: _real(t, start).long(),
    _causal,
    lambda t, start: _causal(t, start)[None],
    lambda t, start: _causal(t, start)[None, None],
    lambda t, start: ~_causal(t, start),
    _additive,
    lambda t, start: _additive(t, start)[None, None],
    lambda t, start: _real(t, start)[:, None],
    lambda t, start: _real(t, start)[:, None, None],
    lambda t, start: _causal(t, start).long(),
)
"""Forms of a mask in the order in which they are tried: none, every token real, then causal ones."""


def fillers(name: str) -> list[Filler]:
    """What an argument of this name may want; none where the name says nothing."""
    lower = name.lower()
    if lower in STARTS:
        return [lambda t, start: start, lambda t, start: torch.tensor(start, device=t.device)]
    if lower in POSITIONS:
        return [_positions, lambda t, start: _positions(t, start).expand(len(t), -1)]
    if lower == "block_mask":
        return [_block_mask, *MASKS]
    if "mask" in lower:
        return list(MASKS)
    if lower in ZEROS:
        return [lambda t, start: torch.zeros_like(t)]
    if lower in LENGTHS:
        return [lambda t, start: torch.full((len(t),), start + t.shape[1], device=t.device)]
    if lower in SIZES:
        return [lambda t, start: t.shape[1]]
    if lower in FLAGS or lower.startswith(("return_", "use_", "output_")):
        return [lambda t, start: False]
    return []


def _positions(tokens: Tensor, start: int) -> Tensor:
    return torch.arange(start, start + tokens.shape[1], device=tokens.device)


def sizes_for(method: Callable[..., Any], rows: int, length: int, dtype: torch.dtype | None) -> dict[str, Any]:
    """Batch size, length and dtype for the arguments of a method that makes caches, by their names."""
    values = {"batch": rows, "bsz": rows, "rows": rows, "length": length, "seq": length, "len": length}
    given: dict[str, Any] = {}
    for name, parameter in inspect.signature(method).parameters.items():
        value: Any = next((v for word, v in values.items() if word in name.lower()), None)
        if "dtype" in name.lower():
            value = dtype
        if value is not None and (parameter.default is inspect.Parameter.empty or "batch" in name.lower()):
            given[name] = value
    return given


def _sizes_in_order(method: Callable[..., Any], given: dict[str, Any], rows: int, length: int) -> dict[str, Any]:
    """Values for required arguments whose names say nothing: the batch size, then the length."""
    left = [
        name
        for name, parameter in inspect.signature(method).parameters.items()
        if parameter.default is inspect.Parameter.empty
        and name not in given
        and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    values = [v for v in (rows, length) if v not in given.values()]
    return {**given, **dict(zip(left, values, strict=False))}


class Setup:
    """Calls a model's own method that makes its caches (`setup_caches`), for one batch size; `undo` takes them away."""

    def __init__(self, name: str, length: int):
        self.name, self.length = name, length
        self._before: WeakKeyDictionary[nn.Module, list[tuple[dict[str, Any], ...]]] = WeakKeyDictionary()

    def __call__(self, model: nn.Module, rows: int) -> None:
        self.undo(model)
        self._before[model] = [_attributes(m) for m in model.modules()]
        method, given = getattr(model, self.name), self.sizes(model, rows)
        # what an earlier call noted under the name of its argument, such as a largest batch size, would make it return
        # at once; other limits are the model's own, and it may need them
        for name in inspect.signature(method).parameters:
            value = vars(model).get(name)
            if name.startswith("max_") and isinstance(value, int) and not isinstance(value, bool):
                setattr(model, name, -1)
        with contextlib.suppress(TypeError):
            method(**given)

    def sizes(self, model: nn.Module, rows: int) -> dict[str, Any]:
        """The arguments of its method for one batch size."""
        method, dtype = getattr(model, self.name), next((p.dtype for p in model.parameters()), None)
        return _sizes_in_order(method, sizes_for(method, rows, self.length, dtype), rows, self.length)

    def undo(self, model: nn.Module) -> None:
        """Give every module the attributes, buffers and parts that it had before; in-place writes stay."""
        before = self._before.pop(model, None)
        for held, buffers, parts in before or ():
            module = held[""]
            for kept, now in ((buffers, module._buffers), (parts, module._modules)):
                now.clear()
                now.update(kept)
            for name in [n for n in vars(module) if n not in held]:
                delattr(module, name)
            vars(module).update({name: value for name, value in held.items() if name})


def _attributes(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """A module's attributes, with itself under "", its buffers and its parts."""
    return {**vars(module), "": module}, dict(module._buffers), dict(module._modules)


class Reset:
    """Calls a model's own method that empties the caches it keeps (`reset_kv_cache`)."""

    def __init__(self, name: str):
        self.name = name

    def __call__(self, model: nn.Module, rows: int) -> None:
        getattr(model, self.name)(**self.sizes(model, rows))

    def sizes(self, model: nn.Module, rows: int) -> dict[str, Any]:
        """The arguments of its method for one batch size."""
        return sizes_for(getattr(model, self.name), rows, 256, None)

    def undo(self, model: nn.Module) -> None:
        """A plain call leaves the caches alone: nothing is to be done before it."""


Begin = Setup | Reset
