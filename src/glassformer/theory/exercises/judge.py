"""Find what is wrong with a student's answers: compare them with the solution and with every known mistake."""

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from glassformer.theory.exercises.exercise import Case, Exercise, Mistake

CLOSE = 1e-7
"""Relative tolerance: far above float64 rounding, far below float32 rounding."""

Values = tuple[Any, ...]


class FormError(Exception):
    """An answer of the wrong type or with the wrong number of parts. The message is one sentence."""


def unpack(exercise: Exercise, value: Any) -> Values:
    """Return the parts of an answer as float64 arrays, or raise FormError.

    A submission can write to the channel of the runner itself, so a value may have any form.
    """
    try:
        return _unpack(exercise, value)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, MemoryError, RecursionError):
        raise FormError("it returns a value that the grader cannot read: return arrays or numbers") from None


def _unpack(exercise: Exercise, value: Any) -> Values:
    names = exercise.returns
    if value is None:
        raise FormError("it returns None: is there a `return` at the end?")
    parts = value.get("tuple", value.get("list")) if isinstance(value, dict) else None
    if len(names) == 1:
        return (_array(exercise, names[0], value),)
    if parts is None or "array" in value:
        raise FormError(f"it returns {_kind(value)}: return {len(names)} values, {', '.join(names)}")
    if len(parts) != len(names):
        raise FormError(f"it returns {len(parts)} values: return {len(names)}, {', '.join(names)}")
    return tuple(_array(exercise, name, part) for name, part in zip(names, parts, strict=True))


def _array(exercise: Exercise, name: str, value: Any) -> np.ndarray:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        raise FormError(f"`{name}` is {_kind(value)}: return numbers")
    if isinstance(value, int | float):
        return np.asarray(value, float)
    if "array" in value:
        return np.array(value["array"], float).reshape(value["shape"])
    parts = value.get("list", value.get("tuple"))
    if parts is None:
        raise FormError(f"`{name}` is {_kind(value)}: return an array or numbers")
    try:
        return np.array([_array(exercise, name, part) for part in parts], float)
    except ValueError:
        raise FormError(f"`{name}` is a list whose rows have different lengths") from None


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        if "array" in value:
            return f"one array of shape {tuple(value['shape'])}"
        for kind in ("list", "tuple"):
            if kind in value:
                return f"a {kind} of {len(value[kind])}"
        return f"a value of type {value['type']}"
    return "None" if value is None else f"a {type(value).__name__}"


def right(exercise: Exercise, case: Case, mistakes: Sequence[Mistake] = ()) -> Values:
    """Return the correct answer, or the answer with the given mistakes."""
    function = exercise.variant(mistakes)
    if function is None:
        raise ValueError("these mistakes exclude each other")
    with np.errstate(all="ignore"):
        value = function(*copy.deepcopy(list(case.arguments.values())))
    parts = value if isinstance(value, tuple) else (value,)
    return tuple(np.asarray(part, float) for part in parts)


def same(exercise: Exercise, a: Values, b: Values) -> bool:
    """Return whether two answers agree, including their shapes; integers must be equal."""
    tolerance = 0.0 if exercise.whole else CLOSE
    return len(a) == len(b) and all(
        x.shape == y.shape and np.allclose(x, y, rtol=tolerance, atol=tolerance, equal_nan=True)
        for x, y in zip(a, b, strict=True)
    )


def is_right(exercise: Exercise, case: Case, given: Values) -> bool:
    """Return whether an answer is correct."""
    if exercise.accepts is not None:
        return not exercise.accepts(case, given)
    return same(exercise, given, right(exercise, case))


def wrong_cases(exercise: Exercise, cases: Sequence[Case], answers: Sequence[Values]) -> list[int]:
    """Return the indices of the cases with a wrong answer."""
    pairs = zip(cases, answers, strict=True)
    return [n for n, (case, given) in enumerate(pairs) if not is_right(exercise, case, given)]


def diagnose(exercise: Exercise, cases: Sequence[Case], answers: Sequence[Values]) -> list[str]:
    """Return sentences that describe what is wrong; an empty list if nothing is."""
    wrong = wrong_cases(exercise, cases, answers)
    if not wrong:
        return []
    if exercise.accepts is not None:
        found = [exercise.accepts(cases[n], answers[n]) for n in wrong]
        return list(dict.fromkeys(found))
    mistakes = recognise(exercise, cases, answers)
    if mistakes:
        return [mistake.message for mistake in mistakes]
    ordinary = [n for n in wrong if not cases[n].hint]
    first = (ordinary or wrong)[0]
    case, given, expected = cases[first], answers[first], right(exercise, cases[first])
    sentences = [_order(exercise, given, expected) or _shape(exercise, case, given, expected)]
    if not sentences[0]:
        hints = [] if ordinary else list(dict.fromkeys(cases[n].hint for n in wrong))
        seen = _transposed(exercise, given, expected) or exercise.inspect(case.arguments, given)
        seen = "" if hints else seen or _relation(exercise, given, expected)
        sentences = [*hints, *([seen] if seen else []), _difference(exercise, case, given, expected)]
    return sentences


def recognise(exercise: Exercise, cases: Sequence[Case], answers: Sequence[Values]) -> tuple[Mistake, ...]:
    """Return the known mistake, or the two known mistakes, that give exactly these answers."""
    for size in (1, 2):
        for chosen in itertools.combinations(exercise.mistakes, size):
            pairs = zip(cases, answers, strict=True)
            if exercise.variant(chosen) and all(_made(exercise, case, given, chosen) for case, given in pairs):
                return chosen
    return ()


def _made(exercise: Exercise, case: Case, given: Values, mistakes: Sequence[Mistake]) -> bool:
    try:
        return same(exercise, given, right(exercise, case, mistakes))
    except Exception:  # two mistakes may be incompatible
        return False


def _order(exercise: Exercise, given: Values, expected: Values) -> str:
    """Name the order of the returned values if only that is wrong."""
    for order in itertools.permutations(range(len(given))):
        if order != tuple(range(len(given))) and same(exercise, tuple(given[n] for n in order), expected):
            return f"you return the right values in another order: return {', '.join(exercise.returns)}"
    return ""


def _transposed(exercise: Exercise, given: Values, expected: Values) -> str:
    """Name the first wrong value if it is the transpose of the right one."""
    for name, got, want in zip(exercise.returns, given, expected, strict=True):
        if not same(exercise, (got,), (want,)):
            return f"`{name}` is the transpose of the correct answer" if same(exercise, (got.T,), (want,)) else ""
    return ""


def _shape(exercise: Exercise, case: Case, given: Values, expected: Values) -> str:
    for name, got, want in zip(exercise.returns, given, expected, strict=True):
        if got.shape != want.shape:
            transposed = got.ndim == 2 and got.T.shape == want.shape and np.allclose(got.T, want, equal_nan=True)
            remedy = ": it is the transpose of the correct answer" if transposed else ""
            return f"`{name}` has the shape {got.shape}, not {want.shape}, for {case.label}{remedy}"
    return ""


def _relation(exercise: Exercise, given: Values, expected: Values) -> str:
    """Describe how a wrong answer is related to the correct one, if the relation is simple."""
    pairs = zip(given, expected, strict=True)
    got, want = next(pair for pair in pairs if not same(exercise, pair[:1], pair[1:]))
    if exercise.whole:
        return ""
    if not np.isfinite(got).all():
        return "your answer contains NaN or infinite values"
    if np.allclose(got, want, rtol=1e-4, atol=1e-5):
        return "your answer is correct to a few digits only: compute in float64"
    where = np.abs(want) > 1e-6
    if where.sum() > 1:
        ratios = got[where] / want[where]
        if np.allclose(ratios, ratios.flat[0]) and np.allclose(got[~where], 0, atol=1e-5):
            return f"your answer is {ratios.flat[0]:.6g} times the correct one"
    if got.size > 1 and np.allclose(got - want, (got - want).flat[0]):
        return f"your answer is the correct one plus {float((got - want).flat[0]):.6g}"
    if got.ndim >= 1 and got.shape[0] > 1 and np.allclose(got[::-1], want):
        return "your rows are in reverse order"
    if got.ndim >= 1 and got.shape[0] > 2:
        if np.allclose(got[1:], want[1:]):
            return "every row except the first is correct"
        if np.allclose(got[:-1], want[:-1]):
            return "every row except the last is correct"
        if np.allclose(got[:-1], want[1:]):
            return "your rows are shifted: each is one position too early"
        if np.allclose(got[1:], want[:-1]):
            return "your rows are shifted: each is one position too late"
    return ""


def _difference(exercise: Exercise, case: Case, given: Values, expected: Values) -> str:
    for name, got, want in zip(exercise.returns, given, expected, strict=True):
        if not same(exercise, (got,), (want,)):
            with np.errstate(invalid="ignore"):
                apart = np.nan_to_num(np.abs(got - want), nan=np.inf)
            where = np.unravel_index(int(apart.argmax()), want.shape)
            index = f"[{', '.join(str(int(i)) for i in where)}]" if where else ""
            numbers = (float(got[where]), float(want[where]))
            a, b = (f"{x:,.0f}" if exercise.whole and float(x).is_integer() else f"{x:.6g}" for x in numbers)
            return f"for {case.label}, `{name}{index}` is {a} and should be {b}"
    return ""
