"""How a model wants to be called: its arguments by their usual names, its outputs by their usual forms.

Signature inspection decides which arguments exist. Nothing is assumed that the signature does not show.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from glassformer.doctor.subject.arguments import Begin, Filler, Setup, fillers
from glassformer.doctor.subject.errors import CannotExamineError, Unsupported

MASK = ("attention_mask", "mask", "padding_mask", "key_padding_mask", "pad_mask", "input_mask", "src_key_padding_mask",
        "token_mask")  # fmt: skip
POSITIONS = ("position_ids", "positions", "pos", "position", "pos_ids", "input_pos", "pos_idx")
CACHE = ("past_key_values", "cache", "kv_cache", "layer_past", "past_kv", "past", "kv_caches", "caches", "kvcache",
         "cache_params", "state", "states", "inference_params", "past_states")  # fmt: skip
TARGET = ("decoder_input_ids", "tgt", "target", "trg", "tgt_ids", "decoder_input", "target_ids", "tgt_tokens",
          "decoder_ids",
          "dec_input", "y_in")  # fmt: skip
SOURCE_MASK = ("src_mask", "source_mask", "attention_mask", "src_key_padding_mask", "encoder_attention_mask",
               "src_padding_mask", "encoder_mask")  # fmt: skip
TARGET_MASK = ("tgt_mask", "target_mask", "decoder_attention_mask", "tgt_key_padding_mask", "trg_mask", "mask",
               "tgt_padding_mask")  # fmt: skip
AMBIGUOUS = ("tgt", "target", "trg", "tgt_ids", "target_ids", "tgt_tokens")
"""Names of TARGET that are given to labels too."""
LABELS = ("labels", "targets", "label", "y")
PADDING_NAMES = ("padding_mask", "key_padding_mask", "pad_mask", "src_key_padding_mask", "tgt_key_padding_mask")
RETURNED = (*CACHE, "present", "presents", "new_cache", "next_cache", "kv", "new_kv", "presents_kv")
"""Fields of a result that hold a cache."""
USE_CACHE = (
    "use_cache",
    "return_cache",
    "with_cache",
    "return_kv",
    "use_kv_cache",
    "return_present",
    "use_kv",
    "caching",
)
MAKERS = ("new_cache", "make_cache", "init_cache", "empty_cache", "create_cache", "setup_cache", "get_cache")


@dataclass
class Interface:
    """Names of the arguments a model takes; None where it has none."""

    tokens: str | None
    target: str | None = None
    mask: str | None = None
    positions: str | None = None
    cache: str | None = None
    source_mask: str | None = None
    labels: str | None = None
    maker: str | None = None
    """Method that makes an empty cache; None where the model makes one itself when `use_cache` is passed."""
    empty: Callable[[], Any] | None = None
    """Makes the empty container that the model fills with its cache in place, found by trying."""
    flags: dict[str, Any] = field(default_factory=dict)
    """Arguments to pass always (return_dict) or with a cache (use_cache)."""
    use_cache: str | None = None
    attentions: str | None = None
    library: bool = False
    """The model is, or wraps, a class of Hugging Face's transformers: the library's documented conventions hold."""
    shifts_labels: bool = False
    """The model declares that it shifts `labels` itself: it has the interface of transformers, input_ids and labels."""
    mask_dtype: torch.dtype = torch.long
    mask_inverted: bool = False
    target_is_optional: bool = False
    """The argument taken for a target sequence has a default and a name that labels go by too."""
    needs_labels: bool = False
    """Logits of all positions only come with targets (nanoGPT's way)."""
    required: list[str] = field(default_factory=list)
    """Arguments without a default, beyond the tokens and the target."""
    fill: dict[str, Filler] = field(default_factory=dict)
    """How each required argument is filled, found by trying."""
    internal: bool = False
    """The model keeps its cache itself and gets the positions of new tokens in an argument such as `start_pos`."""
    setup: Setup | None = None
    """What makes the caches that the model keeps itself, for models that do not run without."""
    begin: Begin | None = None
    """What starts a sequence with the cache that the model keeps itself; a plain call goes without one."""
    address: dict[str, Filler] = field(default_factory=dict)
    """Arguments that go with that cache only."""
    time_first: bool = False
    """Tokens are (T,B) and logits (T,B,V)."""

    @property
    def is_seq2seq(self) -> bool:
        return self.target is not None

    @property
    def positions_from_caller(self) -> bool:
        """Under left padding the caller passes the positions: the convention of transformers and of `position_ids`."""
        return self.positions is not None and (self.library or self.positions.endswith("position_ids"))


def is_pretrained(model: Any) -> bool:
    """Whether a model is a class of transformers, compiled or not. Names of its arguments do not tell."""
    model = getattr(model, "_orig_mod", model)
    return any(
        c.__name__ == "PreTrainedModel" and c.__module__.startswith("transformers.") for c in type(model).__mro__
    )


def inspect_call(model: Any, single: bool = False) -> Interface:
    """Read the signature of `model.forward` (or of the callable itself).

    `single`: the model is known to take one sequence, so that an argument named like a target sequence holds labels.
    """
    function = model.forward if isinstance(model, nn.Module) else model
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return Interface(None)
    names = [n for n, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    required = [n for n in names if parameters[n].default is inspect.Parameter.empty]
    if not parameters:
        raise CannotExamineError(
            f"{_called(model)} takes no arguments: it must take token ids, a (B,T) tensor of integers."
        )

    def first(candidates: tuple[str, ...]) -> str | None:
        return next((name for name in candidates if name in names), None)

    def switch(name: str) -> bool:
        return name in names and isinstance(parameters[name].default, bool)

    tokens = names[0] if names else None
    target = None if single else first(TARGET)
    if target == tokens:
        target = None
    seq2seq = target is not None
    found = Interface(
        tokens,
        target,
        mask=first(TARGET_MASK) if seq2seq else first(MASK),
        positions=first(tuple("decoder_" + name for name in POSITIONS)) if seq2seq else first(POSITIONS),
        cache=first(tuple(name for name in CACHE if not switch(name))),
        source_mask=first(SOURCE_MASK) if seq2seq else None,
        labels=first(tuple(name for name in (*LABELS, *TARGET) if name not in (target, tokens))),
        maker=next((m for m in MAKERS if callable(getattr(model, m, None))), None),
        use_cache=first((*USE_CACHE, *(name for name in CACHE if switch(name)))),
        attentions=first(("output_attentions", "return_attention", "need_weights", "return_weights", "return_attn")),
    )
    found.library = isinstance(model, nn.Module) and any(is_pretrained(m) for m in model.modules())
    found.shifts_labels = found.labels == "labels" and (is_pretrained(model) or tokens == "input_ids")
    found.target_is_optional = target in AMBIGUOUS and target not in required
    if "return_dict" in names:
        found.flags["return_dict"] = True
    taken = {found.tokens, found.target, found.mask, found.source_mask, found.positions, found.cache, found.labels}
    found.required = [n for n in required if n not in (found.tokens, found.target)]
    missing = [n for n in found.required if n not in taken and not fillers(n)]
    if missing:
        raise CannotExamineError(
            f"{_called(model)} needs the argument {missing[0]!r} in addition to the tokens: give a callable that fills "
            f"it in, such as lambda tokens: model(tokens, {missing[0]}=...)."
        )
    return found


def _called(model: Any) -> str:
    return type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", type(model).__name__)


class OneVectorError(CannotExamineError):
    """A model returned one vector for each sequence."""


def is_logits(value: Any, shape: tuple[int, int]) -> bool:
    """A floating tensor (B,T,·)."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 3 and value.shape[:2] == shape


def find_logits(output: Any, shape: tuple[int, int], vocab_size: int | None = None) -> Tensor:
    """The logits (B,T,V) in whatever a model returned: a tensor, a tuple, a dictionary, an object with `.logits`.

    Where several tensors could be, one with the vocabulary as its last axis is taken; (T,B,V) is transposed.
    """
    fitting = [c for c in _candidates(output) if is_logits(c, shape)]
    if fitting:
        named = [c for c in _candidates(output)[:1] if is_logits(c, shape)]
        whole = [c for c in fitting if c.shape[-1] == vocab_size]
        return (whole or named or fitting)[0]
    for candidate in _candidates(output):
        if is_logits(candidate, shape[::-1]) and candidate.shape[-1] == vocab_size:
            return candidate.transpose(0, 1)
    for candidate in _candidates(output):
        if isinstance(candidate, Tensor) and candidate.is_floating_point() and candidate.dim() in (2, 3):
            if candidate.dim() == 2 and len(candidate) == shape[0] and candidate.shape[1] < (vocab_size or 0):
                raise OneVectorError(
                    f"it returns one vector for each sequence, shape {tuple(candidate.shape)}, as a classifier does: "
                    "give a function or module that returns the encoder's output at every position, (B,T,·)."
                )
            if candidate.shape[0] == shape[0] and (candidate.dim() == 2 or candidate.shape[1] == 1):
                raise Unsupported(f"it returns logits of the last position only, shape {tuple(candidate.shape)}")
            if candidate.dim() == 2 and shape[0] * shape[1] == candidate.shape[0]:
                return candidate.view(*shape, -1)
    raise CannotExamineError(
        f"for tokens of shape {shape} it returned {_describe(output)}: logits (B,T,V) are needed, as a tensor, first "
        "in a tuple, or under 'logits'."
    )


def _candidates(output: Any) -> list[Any]:
    if isinstance(output, Tensor):
        return [output]
    found: list[Any] = []
    for name in ("logits", "prediction_logits", "lm_logits", "last_hidden_state", "output", "out"):
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if value is not None:
            found.append(value)
    if isinstance(output, Mapping):
        found += [inner for value in output.values() for inner in (_candidates(value) if _nests(value) else [value])]
    elif isinstance(output, tuple | list):
        found += list(output)
    return found


def _nests(value: Any) -> bool:
    """A dictionary inside a dictionary of outputs."""
    return isinstance(value, Mapping)


def find_cache(output: Any) -> Any:
    """The cache a call gave back, None when it gave none (a cache changed in place is the caller's own)."""
    for name in RETURNED:
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if value is not None:
            return value
    if isinstance(output, tuple | list):
        for value in output[1:]:
            if value is not None and not (isinstance(value, Tensor) and value.dim() <= 1):
                return value
    return None


def find_loss(output: Any) -> Tensor | None:
    """The loss a call gave back: a scalar tensor, alone or next to the logits."""
    if isinstance(output, Tensor):
        return output if output.dim() == 0 else None
    for name in ("loss",):
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(value, Tensor):
            return value.reshape(()) if value.numel() == 1 else None
    if isinstance(output, tuple | list):
        for value in output:
            if isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point() and value.dim() <= 1:
                return value.reshape(())
    return None


def _describe(output: Any) -> str:
    if output is None:
        return "None"
    if isinstance(output, Tensor):
        return f"a tensor of shape {tuple(output.shape)} and type {output.dtype}"
    if isinstance(output, tuple | list):
        return f"a {type(output).__name__} of " + (", ".join(_describe(o) for o in output[:4]) or "nothing")
    if isinstance(output, Mapping):
        return "a dictionary with " + (", ".join(map(repr, list(output)[:6])) or "nothing")
    return f"an object of type {type(output).__name__}"
