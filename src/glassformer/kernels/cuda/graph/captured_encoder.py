"""Texts on a GPU: padded batches through an encoder's own modules, from the third batch of a size on as a CUDA graph.

Launching the operations of an encoder takes the host longer than computing some thousand tokens takes the GPU. So a
batch is padded to one of a few sizes, its ids are copied in one transfer into buffers that never move, and the second
time that a size occurs, all operations after that transfer are captured. Captured or not, the same operations run, so
the result does not depend on earlier calls. Padding is part of the transfer: nothing of the last batch is left.
"""

import contextlib
import threading
import weakref
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from glassformer.errors import GlassformerError
from glassformer.kernels.cuda.graph.steps import addresses
from glassformer.model import EncoderLM
from glassformer.shapes import Float, Int

CAPTURED = 16384
"""Tokens of a padded batch up to which it is captured: the size of the buffers, which all graphs of a model share.

`gf.encode` makes no larger batches, unless one text is longer.
"""
MOST_GRAPHS = 64
"""Sizes that are remembered for a model. Graphs compute in the same memory: one more costs only its list of launches.

10,000 texts of up to 512 tokens are batches of up to 24 lengths, most of them with as many rows as fit.
"""
LENGTH_STEP = 16
"""Short texts are padded to a multiple of this. Attention on a GPU would copy masks whose rows end in between."""
_CHOOSING = threading.Lock()
_LAST: "weakref.WeakKeyDictionary[Any, tuple[Any, CapturedEncoder]]" = weakref.WeakKeyDictionary()
"""The encoder that was made last for each model, and the addresses of the weights that it was made for."""


def graph_encoder(model: EncoderLM, modules: list[nn.Module]) -> "CapturedEncoder":
    """Return what encodes texts by CUDA graphs, which read the weights in place: it is made again only if they move.

    `modules` are all modules of the model's embedding and encoder.
    """
    if any(module._forward_hooks or module._forward_pre_hooks for module in modules):
        raise GlassformerError("a CUDA graph would not call the forward hooks of the model: use engine='torch'.")
    key = (model.dtype, addresses(modules))
    with _CHOOSING, torch.inference_mode(False):  # buffers made in inference_mode could not be written outside it
        found = _LAST.get(model)
        if found is None or found[0] != key:
            found = key, CapturedEncoder(model, modules)
            _LAST[model] = found
    if found[1].failure is not None:
        raise GlassformerError(found[1].failure)
    return found[1]


class Shape(NamedTuple):
    """The size of a padded batch, and what else decides which operations it has."""

    rows: int
    length: int
    is_masked: bool
    """False if every text fills its row: attention needs no mask then."""
    has_segments: bool

    @property
    def tokens(self) -> int:
        return self.rows * self.length


class CapturedEncoder:
    """The encoder of a model, and the CUDA graphs of its padded batches. On a CPU none is captured, for tests."""

    def __init__(self, model: EncoderLM, modules: list[nn.Module]):
        # the parts, not the model: graphs must not keep a model alive
        self.embed, self.stack, self.modules = model.embed, model.encoder, modules
        device = model.device
        self.device, self.captures = device, device.type == "cuda"
        self.given = torch.zeros(3 * CAPTURED, dtype=torch.int32, device=device)
        """Token ids (rows, length), then segment ids if there are any, then the length of each text (rows)."""
        self.index = torch.arange(CAPTURED, device=device)
        self.states: Tensor | None = None
        """Where captured batches write their hidden states (CAPTURED, D): the next one overwrites them."""
        self.graphs: dict[Shape, torch.cuda.CUDAGraph | None] = {}
        """By size, in order of its last use; None if it has occurred once."""
        self.failure: str | None = None
        """Why a batch could not be captured, as a sentence."""
        self.lock = threading.Lock()
        """Held while a batch is launched: other threads use the same buffers afterwards."""
        self.side = torch.cuda.Stream(device) if self.captures else None
        """The stream in which graphs are captured."""
        self.last: Any = None
        """The stream on which the last batch was launched."""

    def encode(
        self, texts: Sequence[Sequence[int]], segments: Sequence[Sequence[int]] | None = None
    ) -> list[Float[Tensor, "T D"]]:
        """Return the hidden states of the texts of one batch. They are parts of one tensor, and no buffers."""
        lengths = [len(text) for text in texts]
        rows, length = padded_shape(len(texts), max(lengths), self.stack.max_position)
        shape = Shape(rows, length, min(lengths) < length, segments is not None)
        ids = torch.frombuffer(host_ids(shape, texts, segments), dtype=torch.int32)
        with self.lock, self._current(), torch.inference_mode(False), torch.no_grad():
            states = self._states(shape, ids, len(texts))
            return list(states.split([size for n in lengths for size in (n, length - n)])[::2])

    @contextlib.contextmanager
    def _current(self) -> Any:
        """Make the device the current one. A batch on another stream than the last one waits for that."""
        if not self.captures:
            yield
            return
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream()
            if self.last is not None and self.last != stream:
                stream.wait_stream(self.last)
            self.last = stream
            yield

    def _states(self, shape: Shape, ids: Int[Tensor, "N"], texts: int) -> Float[Tensor, "M D"]:
        """Return the states of all tokens of some texts, padding included, as a tensor of their own."""
        used = texts * shape.length
        if self.captures:
            ids = ids.pin_memory()  # otherwise the host may wait for the batch before
        if shape.tokens > CAPTURED:
            return self._compute(shape, ids.to(self.device, non_blocking=True))[:used]
        given = self.given[: len(ids)].copy_(ids, non_blocking=True)
        occurred, graph = shape in self.graphs, self.graphs.pop(shape, None)
        if graph is not None:
            assert self.states is not None
            graph.replay()
            states = self.states[:used].clone()
        else:
            states = self._compute(shape, given)
            if occurred and self.captures and self.failure is None:
                # after this thread has computed the same: what torch initializes at its first use cannot be captured
                graph = self._capture(shape, given, states)
            states = states[:used]
        self.graphs[shape] = graph  # the newest is last
        if len(self.graphs) > MOST_GRAPHS:
            del self.graphs[next(iter(self.graphs))]
        return states

    def _compute(self, shape: Shape, given: Int[Tensor, "N"]) -> Float[Tensor, "M D"]:
        """Return the states of all tokens of a padded batch, whose ids are on the device."""
        rows, length = shape.rows, shape.length
        tokens = given[: shape.tokens].view(rows, length)
        segments = given[shape.tokens : 2 * shape.tokens].view(rows, length) if shape.has_segments else None
        x = self.embed(tokens, segments)
        if not shape.is_masked:
            return self.stack(x).flatten(0, 1)
        # without positions, those of each token would be counted from the mask; these are the same for real tokens
        positions = self._index(length)[None]
        return self.stack(x, positions < given[-rows:, None], positions).flatten(0, 1)

    def _index(self, length: int) -> Int[Tensor, "T"]:
        return self.index[:length] if length <= CAPTURED else torch.arange(length, device=self.device)

    def _capture(
        self, shape: Shape, given: Int[Tensor, "N"], states: Float[Tensor, "M D"]
    ) -> torch.cuda.CUDAGraph | None:
        """Capture what has computed these states. Other threads may compute meanwhile."""
        if self.states is None:
            self.states = states.new_empty(CAPTURED, states.shape[1])
        # memory that no graph uses any more may not be used again: the graph that was captured first may be gone
        pool = next((held.pool() for held in self.graphs.values() if held is not None), None)
        graph = torch.cuda.CUDAGraph()
        assert self.side is not None
        self.side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self.side):
                # not torch.cuda.graph, which collects garbage and returns unused memory: some tenths of a second
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    self.states[: shape.tokens].copy_(self._compute(shape, given))
                finally:
                    graph.capture_end()
        except torch.OutOfMemoryError:  # next time there may be room
            return None
        except RuntimeError as error:  # a module that the user has changed may wait for the GPU
            reason = str(error).strip().partition("\n")[0].rstrip(".")
            self.failure = f"the model could not be captured as a CUDA graph ({reason}): use engine='torch'."
            return None
        finally:
            torch.cuda.current_stream().wait_stream(self.side)
        # another thread that has finished may have switched dropout on again
        return None if any(module.training for module in self.modules) else graph


def padded_shape(rows: int, length: int, most: int | None) -> tuple[int, int]:
    """Return to how many rows and tokens a batch is padded: each at most an eighth more, or a multiple of 16 tokens.

    `most`: positions of the model.
    """
    padded = _rounded(length, LENGTH_STEP)
    return _rounded(rows, 1), padded if most is None or most < length else min(padded, most)


def _rounded(number: int, least: int) -> int:
    step = max(least, 1 << number.bit_length() >> 4)
    return -(-number // step) * step


def host_ids(shape: Shape, texts: Sequence[Sequence[int]], segments: Sequence[Sequence[int]] | None) -> "array[int]":
    """Return what is copied to the device: token ids, segment ids if there are any, and the length of each text.

    Rows that only pad the batch have one real token, or as many as the others if none is masked.
    """
    values: list[int] = []
    for part in [texts] if segments is None else [texts, segments]:
        for row in part:
            values.extend(row)
            values.extend([0] * (shape.length - len(row)))
        values.extend([0] * (shape.length * (shape.rows - len(part))))
    values.extend(map(len, texts))
    values.extend([1] * (shape.rows - len(texts)))
    return array("I", values)  # without a sign it is filled three times as fast
