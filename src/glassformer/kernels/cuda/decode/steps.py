"""The steps of small models after a prompt that the engine has read: by the persistent kernel, or by a CUDA graph."""

import threading
import weakref
from typing import Any, Literal

import torch

from glassformer.kernels.cuda.decode.batch import CudaBatch
from glassformer.kernels.cuda.decode.decoder import CudaDecoder
from glassformer.kernels.cuda.decode.pack import DTYPES
from glassformer.kernels.cuda.graph.steps import fingerprint
from glassformer.model import DecoderLM
from glassformer.model.cache import Cache

KINDS: dict[str, type[CudaDecoder] | type[CudaBatch]] = {"persistent": CudaDecoder, "batch": CudaBatch}
_CHOOSING = threading.Lock()
"""Held while a decoder is chosen: two threads must not get the same one."""
_LAST: "weakref.WeakKeyDictionary[DecoderLM, tuple[Any, CudaDecoder | CudaBatch]]" = weakref.WeakKeyDictionary()
"""The decoder that was made last for each model, and what it was made for."""


@torch.no_grad()
def small_model_steps(
    kind: Literal["persistent", "batch"],
    model: DecoderLM,
    filled: Cache,
    batch: int,
    slots: int,
    precision: str,
    memory_mask: None = None,
    user: object | None = None,
) -> CudaDecoder | CudaBatch:
    """Return the steps that continue a cache, as `captured_steps` does.

    The decoder that was made last is used again if the weights are the same and it has room for `slots` tokens. As long
    as `user` exists, no other generation gets it.
    """
    key = (kind, batch, precision, fingerprint(model))
    with _CHOOSING:
        made_for, made = _LAST.get(model, (None, None))
        taken = made is not None and made.user is not None and made.user() is not None
        if made is None or made_for != key or taken or made.capacity < slots:
            made = KINDS[kind](model, batch, slots, DTYPES[precision])
            _LAST[model] = (key, made)
        made.user = None if user is None else weakref.ref(user)
    made.take(filled)
    return made
