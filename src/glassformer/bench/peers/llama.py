"""llama.cpp through llama_cpp, at the level of its C functions: one batch of tokens in, logits of the last ones out."""

import ctypes
import importlib.util
import sys
import types
from functools import cached_property
from pathlib import Path
from typing import Any

from glassformer.bench.peers import gguf_file
from glassformer.bench.peers.base import SAMPLING, Mark, Order, config_of, convert_once, library


def file(order: Order) -> Path:
    return order.root / f"{order.precision}.gguf"


def prepare(order: Order) -> None:
    """Write the GGUF file."""
    from glassformer.weights import load

    convert_once(file(order), lambda made: gguf_file.write(made, load(order.model, dtype="float32"), order.precision))


class Peer:
    def __init__(self, order: Order):
        if importlib.util.find_spec("diskcache") is None:  # needed for its prompt cache, which is not used here
            sys.modules["diskcache"] = types.ModuleType("diskcache")
        cpp = library("llama_cpp")
        self.cpp, self.version = cpp, str(cpp.__version__)
        self.n_vocab = config_of(order)["vocab_size"]
        cpp.llama_backend_init()
        self.model = _open(cpp, order)
        settings = cpp.llama_context_default_params()
        rows = len(order.prompts)
        settings.n_ctx = rows * order.length
        settings.n_batch = settings.n_ubatch = max(rows * len(order.prompts[0]), rows)
        settings.n_seq_max = rows
        settings.n_threads = settings.n_threads_batch = order.threads
        start = getattr(cpp, "llama_init_from_model", None) or cpp.llama_new_context_with_model
        self.context = start(self.model, settings)
        if not self.context:
            raise RuntimeError("llama.cpp made no context")
        self.batch = cpp.llama_batch_init(settings.n_batch, 0, 1)

    def generate(
        self, prompts: tuple[tuple[int, ...], ...], new: int, mark: Mark, sampled: bool = False
    ) -> list[list[int]]:
        self._forget()
        fed = [list(prompt) for prompt in prompts]
        found: list[list[int]] = [[] for _ in prompts]
        position = 0
        for _ in range(new):
            lasts = self._decode(fed, position)
            position += len(fed[0])
            fed = [[int(token)] for token in (self._drawn if sampled else self._greedy)(lasts)]
            for row, (token,) in zip(found, fed, strict=True):
                row.append(token)
            mark()
        return found

    def _decode(self, rows: list[list[int]], position: int) -> list[int]:
        """Run one batch and return the index of each sequence's last token in it."""
        batch, at, lasts = self.batch, 0, []
        for number, row in enumerate(rows):
            for i, token in enumerate(row):
                batch.token[at], batch.pos[at] = token, position + i
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, number
                batch.logits[at] = i == len(row) - 1
                at += 1
            lasts.append(at - 1)
        batch.n_tokens = at
        failed = self.cpp.llama_decode(self.context, batch)
        if failed:
            raise RuntimeError(f"llama_decode answered {failed}")
        return lasts

    def _greedy(self, lasts: list[int]) -> list[Any]:
        import numpy as np

        chosen = []
        for at in lasts:
            logits = self.cpp.llama_get_logits_ith(self.context, at)
            pointer = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
            chosen.append(np.ctypeslib.as_array(pointer, (self.n_vocab,)).argmax())
        return chosen

    def _drawn(self, lasts: list[int]) -> list[Any]:
        return [self.cpp.llama_sampler_sample(self.sampler, self.context, at) for at in lasts]

    @cached_property
    def sampler(self) -> Any:
        """Its own samplers. A temperature after top-k removes the same tokens, and divides fewer numbers."""
        cpp = self.cpp
        chain = cpp.llama_sampler_chain_init(cpp.llama_sampler_chain_default_params())
        for one in (
            cpp.llama_sampler_init_top_k(SAMPLING["top_k"]),
            cpp.llama_sampler_init_temp(SAMPLING["temperature"]),
            cpp.llama_sampler_init_top_p(SAMPLING["top_p"], 1),
            cpp.llama_sampler_init_dist(1),
        ):
            cpp.llama_sampler_chain_add(chain, one)
        return chain

    def _forget(self) -> None:
        """Empty the cache; the function's name changed between versions."""
        cpp = self.cpp
        if hasattr(cpp, "llama_memory_clear"):
            cpp.llama_memory_clear(cpp.llama_get_memory(self.context), True)
        else:
            cpp.llama_kv_cache_clear(self.context)


def _open(cpp: Any, order: Order) -> Any:
    settings = cpp.llama_model_default_params()
    settings.n_gpu_layers = 0
    load = getattr(cpp, "llama_model_load_from_file", None) or cpp.llama_load_model_from_file
    model = load(str(file(order)).encode(), settings)
    if not model:
        raise RuntimeError(f"llama.cpp cannot read {file(order).name}")
    return model
