"""Which engine decodes: torch, or the compiled kernels where they are built and know the model."""

import os
from typing import Literal

import torch

from glassformer.kernels.cpu.decode import library
from glassformer.kernels.cpu.decode.decoder import unsupported
from glassformer.kernels.cpu.decode.pack import KINDS, Precision
from glassformer.model import DecoderLM, Seq2Seq
from glassformer.model.cache import CacheKind

Engine = Literal["auto", "torch", "native"]


def choose_engine(
    model: DecoderLM | Seq2Seq, cache: CacheKind | None, engine: Engine, precision: Precision
) -> Literal["torch", "native"]:
    """`engine` itself where it can do what is asked, or a sentence; auto never compiles and never fails.

    GLASSFORMER_NATIVE=0 keeps auto at torch.
    """
    if engine not in ("auto", "torch", "native"):
        raise ValueError(f"engine={engine!r} is not known: use 'auto', 'torch' or 'native'.")
    if precision not in KINDS:
        raise ValueError(f"precision={precision!r} is not known: use {', '.join(map(repr, KINDS))}.")
    if engine == "torch" and precision != "float32":
        raise ValueError(f"precision={precision!r} needs the compiled kernels: use engine='native' or 'auto'.")
    if engine == "torch":
        return "torch"
    reason = obstacle(model, cache)
    if engine == "native" or precision != "float32":
        if reason is not None:
            raise library.NativeError(f"{reason}: use engine='torch' and precision='float32'.")
        return "native"
    wanted = os.environ.get("GLASSFORMER_NATIVE") != "0" and library.is_built()
    ready = next(model.parameters()).dtype is torch.float32  # anything else would be converted at every call
    return "native" if wanted and ready and reason is None else "torch"


def obstacle(model: DecoderLM | Seq2Seq, cache: CacheKind | None) -> str | None:
    """Why the kernels cannot take this generation; None when they can."""
    if cache not in ("static", "growing"):
        return f"the kernels keep a cache of their own kind, not {cache or 'none'!r}"
    if model.device.type != "cpu":
        return f"the kernels run on a CPU and the model is on {model.device}"
    dtype = next(model.parameters()).dtype
    if dtype not in (torch.float32, torch.bfloat16):
        return f"the kernels start from float32 or bfloat16 weights and the model's are {dtype}"
    return unsupported(model.config)
