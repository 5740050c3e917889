"""Examining without touching: copies, quiet calls, time limits, and everything put back as it was."""

import contextlib
import copy
import io
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any, TextIO

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from glassformer.doctor.subject.errors import CannotExamineError
from glassformer.doctor.subject.snapshot import RandomState, Snapshot

LARGE_BYTES = 1 << 30
"""Above this a model is not copied: it is changed in place and put back."""
WARM = 6.0
"""Factor on weight matrices: fresh ones (standard deviation 0.02) make attention almost uniform and hide bugs."""


def n_bytes(model: Any) -> int:
    if not isinstance(model, nn.Module):
        return 0
    return sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])


def too_large(model: Any) -> bool:
    """Whether a model is examined in place rather than copied."""
    return n_bytes(model) > LARGE_BYTES


class _Ears:
    """A stream that keeps what listening threads write and passes on what others do.

    Replacing `sys.stdout` affects every thread; an examination must not swallow what a server prints meanwhile.
    """

    lock = threading.RLock()

    def __init__(self, real: TextIO):
        self.real = real
        self.heard: dict[int, list[io.StringIO]] = {}

    def _stream(self) -> TextIO:
        mine = self.heard.get(threading.get_ident())
        return mine[-1] if mine else self.real

    def write(self, text: str) -> int:
        return self._stream().write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream(), name)


@contextlib.contextmanager
def _listening(name: str, out: io.StringIO) -> Iterator[None]:
    """What this thread writes to `sys.<name>` goes to `out`."""
    me = threading.get_ident()
    with _Ears.lock:
        now = getattr(sys, name)
        ears = now if isinstance(now, _Ears) else _Ears(now)
        ears.heard.setdefault(me, []).append(out)
        setattr(sys, name, ears)
    try:
        yield
    finally:
        with _Ears.lock:
            ears.heard[me].remove(out)
            if not ears.heard[me]:
                del ears.heard[me]
            if not ears.heard and getattr(sys, name) is ears:
                setattr(sys, name, ears.real)


@contextlib.contextmanager
def quiet(printed: list[str] | None = None) -> Iterator[None]:
    """What the subject prints is kept (in `printed`), its warnings are dropped."""
    out = io.StringIO()
    with _listening("stdout", out), _listening("stderr", out), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            if printed is not None and out.getvalue().strip():
                printed.append(out.getvalue())


class _OutOfTime(BaseException):
    """Not an Exception: a probe that catches whatever a model raises must not catch this."""


_restoring: set[int] = set()
"""Threads that are putting a model back: a limit that passes meanwhile takes effect afterwards."""
AGAIN = 1.0
"""Seconds until a signal that was swallowed, or came while a model was being put back, is sent again."""


@contextlib.contextmanager
def time_limit(seconds: float | None, doing: str) -> Iterator[None]:
    """Raise CannotExamineError after so long.

    In the main thread a signal ends whatever runs. In any other thread nothing is raised from outside: each call of a
    torch function checks the time, so that a model that is slow or loops ends there. A loop that calls no torch
    function, and a single call that does not return, end only with the process; `glass doctor` runs in the main thread.
    """
    if not seconds:
        yield
        return
    main = threading.current_thread() is threading.main_thread()
    try:
        with _alarm(seconds) if main and hasattr(signal, "setitimer") else TimeCheck(seconds):
            yield
    except _OutOfTime:
        raise CannotExamineError(
            f"{doing} took more than {seconds:g} s: it may loop, or be too large (raise the time limit)."
        ) from None


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        if threading.get_ident() not in _restoring:
            raise _OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class TimeCheck(TorchFunctionMode):
    """While active in a thread, a torch function called after the deadline raises instead of running."""

    def __init__(self, seconds: float):
        super().__init__()
        self.end = time.monotonic() + seconds

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if time.monotonic() > self.end and threading.get_ident() not in _restoring:
            raise _OutOfTime
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    me = threading.get_ident()
    _restoring.add(me)
    try:
        yield
    finally:
        _restoring.discard(me)


@contextlib.contextmanager
def preserved(model: Any) -> Iterator[None]:
    """Mode of every module, gradients and random state as they were, whatever happens inside."""
    state = RandomState()
    modules = [(m, m.training) for m in model.modules()] if isinstance(model, nn.Module) else []
    gradients = [(p, p.grad) for p in model.parameters()] if isinstance(model, nn.Module) else []
    try:
        yield
    finally:
        with _uninterrupted():
            state.restore()
            for module, training in modules:
                module.training = training
            for parameter, gradient in gradients:
                parameter.grad = gradient


@contextlib.contextmanager
def borrowed(
    model: Any, warm: float = 1.0, dtype: torch.dtype | None = None, train: bool = False, in_place: bool = False
) -> Iterator[Any]:
    """Yield a deep copy of the model in eval mode, its matrices times `warm`, in `dtype`.

    With `in_place` (see `snapshot.copies_faithfully`), over 1 GB, or where a copy cannot be made, yield the model
    itself, and restore all of it afterwards.
    """
    if not isinstance(model, nn.Module):
        yield model
        return
    isolated = model
    if not in_place and not too_large(model):
        with contextlib.suppress(Exception), quiet():
            isolated = copy.deepcopy(model)
    if isolated is not model:
        with preserved(model):
            prepare(isolated, warm, dtype, train)
            yield isolated
        return
    snapshot = Snapshot(model)
    try:
        prepare(model, warm, dtype, train)
        yield model
    finally:
        with _uninterrupted():
            snapshot.restore()


def prepare(model: nn.Module, warm: float, dtype: torch.dtype | None, train: bool) -> None:
    """Cast, scale the matrices, set the mode, forget gradients."""
    if dtype is not None:
        cast(model, dtype)
    if warm != 1.0:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= 2:
                    parameter.mul_(warm)
    model.train(train)
    for parameter in model.parameters():
        parameter.grad = None


COMPLEX = {torch.float16: torch.complex32, torch.float32: torch.complex64, torch.float64: torch.complex128}


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast in place, complex tensors (tables of rotations) to complex ones: `Module.to` drops their imaginary part."""

    def one(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_complex():
            return tensor.to(COMPLEX.get(dtype, tensor.dtype))
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    model._apply(one)


class NoDropout(TorchFunctionMode):
    """Dropout as identity wherever it is called from: modules, functions, fused attention."""

    IDENTITY = (F.dropout, F.dropout1d, F.dropout2d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in self.IDENTITY:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            kwargs["dropout_p"] = 0.0
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            if len(args) > 4:
                del kwargs["dropout_p"]
        elif func is F.multi_head_attention_forward and len(args) > 10:
            args = (*args[:10], 0.0, *args[11:])
        return func(*args, **kwargs)


class HalfAsFloat(TorchFunctionMode):
    """Matmuls of float16 tensors computed in float32 and rounded to float16.

    A processor without float16 arithmetic takes seven times as long for them. The result is the same up to the rounding
    of sums: what is too large for float16 becomes infinite.
    """

    @classmethod
    def where_slow(cls, isolated: Any) -> Any:
        """This mode for a large subject in float16 on a CPU, else one that does nothing."""
        slow = isolated.dtype == torch.float16 and isolated.large and isolated.device.type == "cpu"
        return cls() if slow else contextlib.nullcontext()

    OPERATORS = (torch.Tensor.matmul, torch.Tensor.__matmul__)
    MATMULS = (F.linear, torch.addmm, torch.baddbmm, torch.matmul, torch.mm, torch.bmm, *OPERATORS)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = [*args, *(kwargs or {}).values()]
        tensors = [a for a in given if isinstance(a, torch.Tensor)]
        if func not in self.MATMULS or not tensors or any(t.dtype != torch.float16 for t in tensors):
            return func(*args, **(kwargs or {}))
        wide = {name: _single(value) for name, value in (kwargs or {}).items()}
        return func(*(_single(a) for a in args), **wide).to(torch.float16)


def _single(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) else value


class AllDouble(TorchFunctionMode):
    """Every float32 that a float64 model asks for by name becomes float64: in its norms, softmax and rotary angles.

    Integers that become float32 stay so, unless they meet a float64 tensor in a product.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float and args[0].dtype == torch.float64:
            return args[0]
        kwargs = {name: _double(value) for name, value in (kwargs or {}).items()}
        args = tuple(_double(value) for value in args)
        dtypes = {a.dtype for a in args if isinstance(a, torch.Tensor)}
        if dtypes == {torch.float32, torch.float64}:
            args = tuple(a.double() if isinstance(a, torch.Tensor) else a for a in args)
        return func(*args, **kwargs)


def _double(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
