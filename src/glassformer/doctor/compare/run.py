"""Two implementations of one model, run side by side to the first operation where they differ.

`compare(a, b)` asks both the same questions (`cases`), in their own precision and in float64. Where the answers differ,
both are run once more with every elementary operation recorded (`record`), the parts are recognised in either
(`anatomy`), their activations are compared in order (`roles`), and the first that differs although its inputs agree is
explained (`explain`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from glassformer.anatomy.fits import distance
from glassformer.anatomy.parts import Anatomy, Lengths, read_anatomy
from glassformer.anatomy.record import record
from glassformer.anatomy.roles import roles_of, walk_roles
from glassformer.doctor.compare.cases import Case, answers, cases_for, is_compiled, prepared
from glassformer.doctor.compare.devices import rounding_errors
from glassformer.doctor.compare.errors import CannotCompareError
from glassformer.doctor.compare.explain import explain
from glassformer.doctor.compare.parameters import parameter_gaps
from glassformer.doctor.compare.patterns import describe
from glassformer.doctor.compare.result import Comparison, Measured
from glassformer.doctor.compare.scene import Scene
from glassformer.doctor.subject.adapt import subject_of
from glassformer.doctor.subject.errors import CannotExamineError
from glassformer.doctor.subject.isolate import cast, quiet
from glassformer.doctor.subject.measure import many
from glassformer.doctor.subject.subject import Kind, Subject

STRICT = 1e-9
"""In float64, relative: some hundred roundings of 2e-16, amplified by depth, stay below 1e-13 in the families tried."""
LOOSE = 1e-4
"""The bound after a difference of float32 rounding (a rotary table kept in it), and where float64 is not possible."""
HALF = 5e-2
"""The same for 16-bit precisions."""


def compare(
    a: Any,
    b: Any,
    tokens: Any = None,
    vocab_size: int | None = None,
    kind: Kind | None = None,
    dtype: torch.dtype | str | tuple[torch.dtype | str | None, torch.dtype | str | None] | None = None,
    names: tuple[str, str] | None = None,
    devices: tuple[str | None, str | None] | None = None,
) -> Comparison:
    """Compare two models: modules, callables from tokens to logits, or folders (paths). Raises CannotCompareError.

    `tokens` (B,T) replaces the cases drawn here; `vocab_size` cuts both vocabularies to their first ids; `dtype` is the
    precision called "own", of both models or a pair; by default each model's. `devices` says where A and B run, such as
    ("cpu", "cuda"); each is then also judged by its rounding error in its own precision (see `compare.devices`).

    >>> model = gf.load("bard")
    >>> gf.compare(model, model).same
    True
    """
    places = devices or (None, None)
    one, two = _subjects((a, b), kind, vocab_size, names or (None, None), places)
    dtypes = dtype if isinstance(dtype, tuple) else (dtype, dtype)
    for subject, wanted in zip((one, two), dtypes, strict=True):
        if wanted is not None:
            _cast(subject, wanted)
    return compare_subjects(one, two, tokens, vocab_size, names, by_precision=devices is not None)


def compare_subjects(
    one: Subject,
    two: Subject,
    tokens: Any = None,
    vocab_size: int | None = None,
    names: tuple[str, str] | None = None,
    by_precision: bool = False,
) -> Comparison:
    """Compare two subjects; see `compare`. With `by_precision`, their own rounding errors are judged too."""
    size = _agree_on_sizes(one, two, vocab_size)
    given = None if tokens is None else _tokens(tokens, size)
    run = _Run(one, two, cases_for(one, two, given, size), size)
    result = run.judge(names or (one.name, two.name))
    if by_precision and result.same:
        result.rounding = rounding_errors(run.cases, (one, two), run.own, run.exact, run.coarse)
        if not result.rounding.sound:
            result.verdict = "differ"
    result.notes += [f"{n}: {note}" for n, s in (("A", one), ("B", two)) for note in s.notes]
    return result


def _subjects(
    things: tuple[Any, Any],
    kind: Kind | None,
    vocab_size: int | None,
    names: tuple[str | None, str | None],
    places: tuple[str | None, str | None],
) -> list[Subject]:
    """Both adapted; a plain callable knows no vocabulary and takes the other's."""
    found: dict[int, Subject] = {}
    plain = [isinstance(t, Callable) and not isinstance(t, nn.Module) for t in things]  # type: ignore[arg-type]
    for i in sorted((0, 1), key=lambda i: plain[i]):
        known = next((s.vocab_size for s in found.values()), None) if plain[i] else None
        alike = kind or next((s.kind for s in found.values()), None) if plain[i] else kind
        found[i] = _subject(things[i], alike, vocab_size or known, names[i], places[i])
    return [found[0], found[1]]


def _subject(thing: Any, kind: Kind | None, vocab_size: int | None, name: str | None, place: str | None) -> Subject:
    if isinstance(thing, str | Path):
        from glassformer.weights import load

        thing, name = load(str(thing)), name or str(thing)
    try:
        with quiet():
            return replace(subject_of(thing, kind=kind, vocab_size=vocab_size, name=name, device=place))
    except CannotExamineError as error:
        raise CannotCompareError(str(error)) from None


def _agree_on_sizes(a: Subject, b: Subject, vocab_size: int | None) -> int:
    if a.kind != b.kind:
        raise CannotCompareError(
            f"A is taken for {_an(a.kind)} and B for {_an(b.kind)}: compare two of a kind, or say kind= if one is not."
        )
    if vocab_size is None and a.vocab_size != b.vocab_size:
        raise CannotCompareError(
            f"the vocabularies differ, {a.vocab_size} ids in A and {b.vocab_size} in B: these are two models; give "
            f"vocab_size={min(a.vocab_size, b.vocab_size)} if one is only padded."
        )
    mine, theirs = (s.facts.whole("n_layers") for s in (a, b))
    if mine is not None and theirs is not None and mine != theirs:
        raise CannotCompareError(f"A has {many(mine, 'layer')} and B has {theirs}: these are two models.")
    return vocab_size or a.vocab_size


def _an(kind: str) -> str:
    return {"decoder": "a decoder", "encoder": "an encoder", "seq2seq": "an encoder-decoder"}[kind]


def _tokens(tokens: Any, vocab_size: int) -> Tensor:
    try:
        made = torch.as_tensor(tokens)
    except (TypeError, ValueError, RuntimeError):
        raise CannotCompareError("tokens must be a list of ids, or rows of equal length of them.") from None
    made = made[None] if made.dim() == 1 else made
    if made.dim() != 2 or made.numel() == 0 or made.is_floating_point():
        raise CannotCompareError(
            f"tokens of shape {tuple(made.shape)} and type {made.dtype}: give whole ids, (rows, length)."
        )
    if int(made.min()) < 0 or int(made.max()) >= vocab_size:
        worst = int(made.max()) if int(made.max()) >= vocab_size else int(made.min())
        raise CannotCompareError(f"token id {worst} is outside the vocabulary of {vocab_size} (0 to {vocab_size - 1}).")
    return made.long()


def _cast(subject: Subject, dtype: torch.dtype | str) -> None:
    import copy

    wanted = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if wanted not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise CannotCompareError(f"dtype {dtype!r} is not known: use float64, float32, bfloat16 or float16.")
    if not isinstance(subject.model, nn.Module) or subject.dtype == wanted:
        return
    if subject.in_place:
        raise CannotCompareError(
            f"{subject.name} cannot be copied, so it cannot be cast to {dtype}: cast it first, or leave out dtype."
        )
    subject.model = copy.deepcopy(subject.model)
    cast(subject.model, wanted)


def extra_operations(one: Anatomy, two: Anatomy) -> str:
    """Which elementary operations one model has more of than the other: softmax, then most different first."""
    found = []
    for who, mine, other in (("A", one.operations, two.operations), ("B", two.operations, one.operations)):
        more = sorted((mine - other).items(), key=lambda item: ("softmax" not in item[0], -item[1]))[:5]
        if more:
            found.append(f"{who} has {', '.join(f'{count} more {name}' for name, count in more)}")
    return "; ".join(found) or "both have the same operations in another order"


@dataclass
class _Run:
    a: Subject
    b: Subject
    cases: list[Case]
    size: int

    @property
    def coarse(self) -> torch.dtype:
        """The less precise of the two, what both are rounded to before they are compared in float64."""
        return max((self.a.dtype, self.b.dtype), key=lambda d: torch.finfo(d).eps)

    def judge(self, names: tuple[str, str]) -> Comparison:
        measured = self.measure()
        gaps = parameter_gaps(self.a.module, self.b.module, self.coarse)
        failing = [c for c, m in zip(self.cases, measured, strict=True) if m.agrees is False]
        asked = [m for m in measured if m.agrees is not None]
        if not asked:
            raise CannotCompareError(f"nothing could be asked of both: {measured[0].note}.")
        result = Comparison(names, "same" if not failing else "differ", measured, parameters=gaps)
        if not failing:
            return result
        plain = [c for c in failing if c.prompt is None]
        if not plain:
            result.notes.append("only the cached path differs: its operations are not followed, see `glass doctor`.")
            self._say_pattern(result, failing[0])
            return result
        # a case of some length shows positions and masks; padding only where nothing else differs
        case = next((c for c in plain if c.mask is None and c.tokens.shape[1] >= 13), plain[0])
        result.case = case.name
        self._follow(result, case)
        return result

    def measure(self) -> list[Measured]:
        both = (self.a, self.b)
        own = [answers(s, self.cases, self.coarse, exact=False) for s in both]
        if all(s.module is not None for s in both):
            exact = [answers(s, self.cases, self.coarse, exact=True) for s in both]
        else:
            which = " and ".join(n for n, s in zip("AB", both, strict=True) if s.module is None)
            exact = [{c.name: f"{which} is no module and cannot be cast" for c in self.cases}] * 2
        self.own, self.exact = own, exact
        found = []
        for case in self.cases:
            one, note = self._gap(case, own)
            two, refused = self._gap(case, exact)
            if two is not None:
                why = "float64: rounding is a thousandth of this"
                found.append(Measured(case.name, one, two, STRICT, why))
            else:
                bound = LOOSE if self.coarse.itemsize >= 4 else HALF
                why = f"rounding of {str(self.coarse).removeprefix('torch.')}, since float64 is not possible: {refused}"
                found.append(Measured(case.name, one, None, bound, why, note or f"no float64 ({refused})"))
        return found

    def _gap(self, case: Case, answers: list[dict[str, Any]]) -> tuple[float | None, str]:
        x, y = (found[case.name] for found in answers)
        for who, answer in (("A", x), ("B", y)):
            if isinstance(answer, str):
                return None, answer if "cannot be cast" in answer else f"{who}: {answer}"
        x, y = x[..., : self.size], y[..., : self.size]
        if case.real is not None:
            x, y = x[case.real], y[case.real]
        if x.shape != y.shape:
            raise CannotCompareError(
                f"logits of shape {tuple(x.shape)} in A and {tuple(y.shape)} in B cannot be compared."
            )
        return distance(x, y), ""

    def _say_pattern(self, result: Comparison, case: Case) -> None:
        for answers_ in (self.exact, self.own):
            x, y = (found[case.name] for found in answers_)
            if isinstance(x, Tensor) and isinstance(y, Tensor):
                result.notes.append(f"{case.name}: {describe(x[..., : self.size], y[..., : self.size], case.real)}")
                return

    def _follow(self, result: Comparison, case: Case) -> None:
        """Find the activation and the reason."""
        exact = result.measured[self.cases.index(case)].exact is not None
        traced = [self._trace(s, case, exact) for s in (self.a, self.b)]
        missing = [n for n, t in zip("AB", traced, strict=True) if isinstance(t, str) or not t.blocks]
        if missing:
            which = " and ".join(missing)
            why = next((t for t in traced if isinstance(t, str)), "no attention was recognised in it")
            result.notes.append(f"inside {which} nothing could be examined ({why}): only logits were compared.")
            self._say_pattern(result, case)
            return
        one, two = traced
        assert isinstance(one, Anatomy)
        assert isinstance(two, Anatomy)
        if len(one.blocks) != len(two.blocks):
            result.depths = len(one.blocks), len(two.blocks)
            result.notes.append(
                f"A has {many(len(one.blocks), 'attention')} and B has {len(two.blocks)}, so only logits were "
                f"compared: {extra_operations(one, two)}."
            )
            self._say_pattern(result, case)
            return
        self._walk(result, one, two, case, STRICT if exact else LOOSE)
        if result.first is None and result.verdict == "differ":
            if is_compiled(self.a.model) or is_compiled(self.b.model):
                self._judge_compiler(result)
            else:
                result.notes.append(
                    "every activation that was recognised agrees: they differ in something that was not."
                )
            self._say_pattern(result, case)

    def _judge_compiler(self, result: Comparison) -> None:
        """Both agree as written. A compiled model runs as it is, with the float32 its code asks for."""
        worst = max(m.exact if m.exact is not None else m.own or 0.0 for m in result.measured)
        if worst <= LOOSE:
            result.verdict = "rounding"
            result.notes.append(
                f"as written they agree at every activation; what compiling changes is {worst:.1e}: rounding."
            )
        else:
            result.notes.append("as written they agree at every activation: they differ in what compiling made of one.")

    def _walk(self, result: Comparison, one: Anatomy, two: Anatomy, case: Case, bound: float) -> None:
        a, b = roles_of(one), roles_of(two)
        tiny = 4 * torch.finfo(torch.float32).eps * case.tokens.shape[1]
        steps = walk_roles(a, b, lambda _: bound, case.real)
        for _ in range(2):
            first = next((s for s in steps if s.differs and not s.absolved), None)
            if first is None:
                break
            scene = Scene(a[first.name], b[first.name], first.difference, (one, two), exact=bound == STRICT)
            found = explain(scene)
            if first.difference > tiny or not scene.exact or scene.explains(found.residual):
                result.steps, result.first, result.difference = steps, first.name, first.difference
                result.explanation = found
                return
            result.notes.append(
                f"{first.name} differs by {first.difference:.1e} in float64, no convention explains it and a constant "
                "kept in float32 (such as a rotary table) would: called rounding."
            )
            steps = walk_roles(a, b, lambda _: LOOSE, case.real)
        result.steps = steps
        worst = max((m.exact if m.exact is not None else m.own or 0.0) for m in result.measured)
        if result.notes and worst <= LOOSE:
            result.verdict = "rounding"

    def _trace(self, subject: Subject, case: Case, exact: bool) -> Anatomy | str:
        model = getattr(subject.model, "_orig_mod", subject.model)
        subject = replace(subject, model=model) if is_compiled(subject.model) else subject
        try:
            with prepared(subject, self.coarse, exact) as isolated:
                here = isolated.device
                moved = replace(
                    case,
                    tokens=case.tokens.to(here),
                    source=None if case.source is None else case.source.to(here),
                )
                sources = [t for t in (moved.tokens, moved.source) if t is not None]
                graph, logits = record(lambda: moved.ask(isolated), sources, isolated.model, exact)
                N = None if case.source is None else case.source.shape[1]
                return read_anatomy(graph, Lengths(len(case.tokens), case.tokens.shape[1], N), logits.detach())
        except Exception as error:
            return " ".join(str(error).split())[:160] or type(error).__name__
