"""Inside attention: scale, softmax axis, masks and their values, windows. Read from a trace."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from glassformer.anatomy.scores import FORBIDDEN, hidden_keys
from glassformer.anatomy.trace import Trace, TracedAttention
from glassformer.doctor.subject.declared import NAMES, known_scales, yarn_factor
from glassformer.doctor.subject.measure import visible_keys
from glassformer.doctor.subject.subject import Subject, layer_of
from glassformer.doctor.subject.trace import trace_call
from glassformer.doctor.subject.windows import alternate, own_windows
from glassformer.finding import Finding, Verdict

MASK_CONSTANT = -1e6
"""Trained scores of -1.1e5 have been met in a released model: a mask constant must lie well below it."""
ROUGH = 1e-3
"""Relative; a scale off by less than a thousandth is rounding of the constant."""


@dataclass
class Seen:
    """One attention with its location: layer of which stack, and which keys its queries may see."""

    attention: TracedAttention
    scores: Tensor
    stack: str
    layer: int | None
    role: str
    """`self`, `cross` or `encoder`."""
    allowed: Tensor
    weights: torch.dtype = torch.float32
    """The dtype of the model's weights."""

    @property
    def coarsest(self) -> torch.dtype:
        """The least precise dtype of weights, queries, keys and scores: some of them are float32 in a half model."""
        dtypes = {self.weights, self.scores.dtype, self.attention.q.dtype, self.attention.k.dtype}
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)

    @property
    def mask_bound(self) -> float:
        """The score that a mask must stay below: a constant, or almost the least number of a dtype that has no less."""
        return max(MASK_CONSTANT, 0.99 * torch.finfo(self.coarsest).min)

    @property
    def location(self) -> str:
        if self.layer is None:
            return "one of its attentions"
        return f"layer {self.layer}" + (f" of {self.stack}" if self.stack and self.role != "self" else "")


def look(isolated: Subject, trace: Trace, rows: int, length: int, source: int = 11) -> list[Seen]:
    """The attentions of a trace whose layout is understood."""
    blocks, found, counts = isolated.blocks(), [], dict[str, int]()
    for attention in trace.attentions:
        scores = attention.pattern(rows)
        if scores is None:
            continue
        t, s = scores.shape[-2:]
        at = layer_of(attention.path, blocks)
        stack, layer = at if at else ("", None)
        if isolated.kind == "seq2seq":
            role = "encoder" if (t, s) == (source, source) else "cross" if s == source else "self"
        else:
            role = "encoder" if isolated.kind == "encoder" else "self"
        if layer is None and not blocks:
            layer = counts.get(role, 0)
        counts[role] = counts.get(role, 0) + 1
        expected = {
            "encoder": (source, source) if isolated.kind == "seq2seq" else (length, length),
            "cross": (length, source),
        }
        if (t, s) != expected.get(role, (length, length)):
            continue
        allowed = allowed_keys(isolated, role, t, s, layer, stack)
        found.append(Seen(attention, scores, stack, layer, role, allowed, isolated.dtype))
    return found


def allowed_keys(subject: Subject, role: str, t: int, s: int, layer: int | None, stack: str = "") -> Tensor:
    """Which keys a query should see: the past, or everything, within the declared window."""
    i, j = torch.arange(t)[:, None], torch.arange(s)[None]
    if role == "cross":
        return torch.ones(t, s, dtype=torch.bool)
    allowed = j <= i if role == "self" else torch.ones(t, s, dtype=torch.bool)
    window = window_of(subject, role, layer, stack)
    if window is not None:
        allowed = allowed & ((i - j).abs() < window)
    return allowed


def window_of(subject: Subject, role: str, layer: int | None, stack: str = "") -> int | None:
    """The declared window of a layer of the encoder or of the decoder: by its own modules, else by the config."""
    facts = subject.facts.of_stack("encoder" if role == "encoder" else "decoder")
    own = {} if facts.by_layer(layer or 0) else own_windows(subject)
    if layer is not None and (stack, layer) in own:
        return own[stack, layer]
    return facts.window_of(layer or 0)


def _two_sided(one: Seen, window: int) -> Seen:
    """An encoder's window is counted as W on each side, W - 1, half of it, or W in all. Take the one that is met."""
    i, j = torch.arange(one.scores.shape[-2])[:, None], torch.arange(one.scores.shape[-1])[None]
    half, other = window // 2, (window - 1) // 2
    for back, ahead in ((window - 1,) * 2, (window,) * 2, (half, half), (other, half), (half, other)):
        allowed = (i - j <= back) & (j - i <= ahead)
        if torch.equal(~hidden_keys(one.scores), allowed.expand_as(one.scores)):
            return replace(one, allowed=allowed)
    return one


def traced(subject: Subject, warm: float = 1.0, length: int | None = None, rows: int = 2) -> list[Seen]:
    """Trace a plain forward. The length differs from the source's 11, from heads and from rows."""
    length = subject.length(length or 23)
    with subject.isolated(warm) as isolated:
        trace = trace_call(isolated, isolated.tokens(rows, length, seed=5))
        return look(isolated, trace, rows, length)


NOTHING = "no softmax over products q·k was seen (linear attention, another layout, or no attention at all)"


def scale(subject: Subject, seen: list[Seen]) -> Finding:
    """The factor between q·k and the softmax input against the declared one, else 1/√d_head."""
    if not seen:
        return Finding.skip("attn_scale/ratio", NOTHING)
    wrong: list[tuple[float, float, Seen, str]] = []
    learned = False
    for one in seen:
        found = one.attention
        width = found.q.shape[-1]
        declared = subject.facts.attention_scale(width, one.layer or 0)
        expected, why = declared if declared else (width**-0.5, "1/√d_head, the usual scale (none is declared)")
        if found.learned_scale or (found.normed and declared is None):
            learned = True
            continue
        if declared is None and subject.facts.position_kind == "t5" and abs(found.scale - 1) < ROUGH:
            continue  # a bias of T5's kind usually comes with unscaled scores
        if abs(found.scale / expected - 1) > ROUGH and not _by_design(subject, one, expected, declared is not None):
            wrong.append((found.scale, expected, one, why))
    if wrong:
        found_scale, expected, one, why = wrong[0]
        width, layers = one.attention.q.shape[-1], sorted({str(w[2].layer) for w in wrong})
        names = known_scales(width, subject.facts.whole("d_model"), subject.facts.whole("n_heads"))
        name = next((n for n, v in names.items() if abs(found_scale / v - 1) < ROUGH), None)
        return Finding(
            "attn_scale/ratio",
            Verdict.FAIL,
            found_scale / expected,
            1.0,
            f"softmax input over q·k is {found_scale:.4g}{f' = {name}' if name else ''}, "
            f"expected {expected:.4g} ({why})",
            f"Multiply q·k by {expected:.4g} once, before the mask and softmax.",
            {"layer": one.layer, "layers": layers, "measured": found_scale, "expected": expected},
        )
    why = "scale as declared" + ("; a learned scale or normed q and k were not judged" if learned else "")
    return Finding("attn_scale/ratio", Verdict.PASS, 1.0, 1.0, why)


def _by_design(subject: Subject, one: Seen, expected: float, declared: bool) -> bool:
    """Whether YaRN's declared factor or attributes of the attention module account for the scale that was measured.

    One that is a factor beyond the usual scale accounts for it, or one that is the scale itself and none of the usual
    mistakes. So does a usual scale that the module keeps next to another number of the name that the config has: then
    the config's number is something else.
    """
    usual, scale = one.attention.q.shape[-1] ** -0.5, one.attention.scale
    if not declared and abs(scale / expected / yarn_factor(subject.facts.raw) ** 2 - 1) < ROUGH:
        return True
    numbers = _numbers_of(subject, one.attention.path)
    if declared:
        names = [n for n in SCALE_NAMES if n in numbers and n in subject.facts.raw]
        own = [n for n, v in numbers.items() if n in SCALE_NAMES and n not in names and abs(v / usual - 1) < ROUGH]
        kept = any(abs(numbers[n] / expected - 1) < ROUGH for n in names)
        return bool(own) and kept and abs(scale / usual - 1) < ROUGH
    named = known_scales(one.attention.q.shape[-1], subject.facts.whole("d_model"), subject.facts.whole("n_heads"))
    odd = not any(abs(scale / v - 1) < ROUGH for v in named.values())
    if odd and any(n in SCALE_NAMES and abs(v / scale - 1) < ROUGH for n, v in numbers.items() if v):
        return True  # the module keeps this very number as its scale, and it is none of the usual mistakes
    common = [v for value in known_scales(one.attention.q.shape[-1], None, None).values() for v in (value, 1 / value)]
    factors = [v for v in numbers.values() if v > 0 and not any(abs(v / c - 1) < ROUGH for c in common)]
    return any(abs(scale / expected / f - 1) < ROUGH for v in factors for f in (v, v**2))


SCALE_NAMES = (*NAMES["scale"], "norm_factor", "inv_norm_factor", "scale_factor")


def _numbers_of(subject: Subject, path: str) -> dict[str, float]:
    """Numbers that a module keeps as plain attributes."""
    try:
        module = subject.module.get_submodule(path) if subject.module is not None else None
    except AttributeError:
        return {}
    kept = vars(module) if module is not None else {}
    return {n: float(v) for n, v in kept.items() if isinstance(v, int | float) and not isinstance(v, bool)}


def softmax_axis(subject: Subject, seen: list[Seen]) -> Finding:
    """What multiplies v sums to 1 over the keys, for every query."""
    if not seen:
        return Finding.skip("softmax_axis/row-sums", NOTHING)
    worst = 0.0
    for one in seen:
        read = one.attention.contracted
        if read is None:
            continue
        sums = read.double().sum(-1)
        off = float((sums - 1).abs().max())
        if off > 1e-2 and one.attention.dim != one.attention.scores.dim() - 1:
            axis = {0: "the batch", 1: "the heads", 2: "the queries"}.get(one.attention.dim, "another axis")
            return Finding(
                "softmax_axis/row-sums",
                Verdict.FAIL,
                off,
                1e-2,
                f"weights of a query sum to {float(sums.min()):.3g} … {float(sums.max()):.3g}, not to 1: softmax ran "
                f"over "
                f"{axis} (dim {one.attention.dim})",
                "Take softmax over the keys: dim=-1 of scores (B,H,T,S).",
                {"layer": one.layer, "axis": axis},
            )
        worst = max(worst, off if one.attention.dim == one.attention.scores.dim() - 1 and off < 1e-2 else 0.0)
    return Finding("softmax_axis/row-sums", Verdict.PASS, worst, 1e-2, "rows of weights sum to 1 up to rounding")


def masks(subject: Subject, seen: list[Seen]) -> Iterator[Finding]:
    """Forbidden keys are hidden by a value no score can reach; allowed keys are not hidden."""
    if not seen:
        yield Finding.skip("mask_value/constant", NOTHING)
        yield Finding.skip("over_mask/pattern", NOTHING)
        return
    yield mask_constant(seen)
    yield from _hidden(subject, seen)


def mask_constant(seen: list[Seen]) -> Finding:
    """Check the softmax input at masked positions: -inf and finfo.min are fine, a number near real scores is not."""
    least, notes = -math.inf, []
    for one in seen:
        near = constant_of(one)
        if near is None:
            continue
        least = max(least, near)
        if near > one.mask_bound:
            return Finding(
                "mask_value/constant",
                Verdict.FAIL,
                near,
                one.mask_bound,
                f"forbidden keys get a score of {near:.4g}; trained scores of -1.1e5 have been met, and one below the "
                "constant makes the future the best key",
                "Mask with -inf or torch.finfo(dtype).min.",
                {"layer": one.layer, "value": near, "open": open_layers(seen)},
            )
        if near > FORBIDDEN:
            notes.append(f"{one.location}: {near:.3g}")
    why = "masked scores lie far below any real score" + (f" (finite: {notes[0]})" if notes else "")
    return Finding("mask_value/constant", Verdict.PASS, least, MASK_CONSTANT, why)


def constant_of(one: Seen) -> float | None:
    """The largest score that masks a forbidden key of this attention; None when nothing is masked by a constant."""
    forbidden = ~one.allowed.expand_as(one.scores)
    if not bool(forbidden.any()):
        return None
    values = one.scores[forbidden]
    if float(values.max()) == float(values.min()) < -8:
        return float(values.max())  # one number written over the scores
    hidden = hidden_keys(one.scores) & forbidden
    known = [float(one.scores[hidden].max())] if bool(hidden.any()) else []
    weak = _weak_score(one)
    return max([*known, *([] if weak is None else [weak])], default=None)


def open_layers(seen: list[Seen]) -> list[int]:
    """Layers in which a forbidden key competes with the allowed ones: no mask at all, or not there."""
    found = []
    for one in seen:
        if one.role != "self":
            continue
        future = torch.triu(torch.ones(one.scores.shape[-2:], dtype=torch.bool), diagonal=1)
        values = one.scores[..., future]
        written_over = float(values.max()) == float(values.min()) < -8
        bare = ~hidden_keys(one.scores) & future
        if bool(bare.any()) and not written_over and _weak_score(one) is None:
            found.append(-1 if one.layer is None else one.layer)
    return sorted(set(found))


def _weak_score(one: Seen) -> float | None:
    """Score of the next key where, unhidden, it lies 8 below the query's own everywhere: a weak constant."""
    if one.role != "self" or one.scores.shape[-1] < 4:
        return None
    size = one.scores.shape[-1]
    nexts = torch.diagonal(one.scores, offset=1, dim1=-2, dim2=-1)
    own = torch.diagonal(one.scores, dim1=-2, dim2=-1)[..., : size - 1]
    unhidden = ~torch.diagonal(hidden_keys(one.scores), offset=1, dim1=-2, dim2=-1)
    drop = own - nexts
    # every next key far below its query: one constant, not a score that happens to be low
    weak = unhidden.all(-1) & (drop.amin(-1) > 8)
    return float(nexts[weak].max()) if bool(weak.any()) else None


def _hidden(subject: Subject, seen: list[Seen]) -> Iterator[Finding]:
    sparse = sparse_fields(subject)
    by_turns = _full_by_turns(seen)
    for one in seen:
        hidden = hidden_keys(one.scores)
        window = window_of(subject, one.role, one.layer, one.stack)
        if id(one) in by_turns:
            continue
        if one.role == "encoder" and window is not None:
            one = _two_sided(one, window)
        wrong = hidden & one.allowed
        open_ = ~hidden & ~one.allowed
        i, j = torch.arange(hidden.shape[-2])[:, None], torch.arange(hidden.shape[-1])[None]
        outside = open_ & ((j <= i) if one.role == "self" else torch.ones_like(j <= i))
        if window is not None and (bool(outside.any()) or bool(wrong.any())):
            count = int((~hidden & (j <= i)).sum(-1).max()) if one.role == "self" else int((~hidden).sum(-1).max())
            yield Finding(
                "window/count",
                Verdict.FAIL,
                float(count),
                float(window),
                f"{visible_keys(count)} in {one.location}; the declared window is {window}",
                "Let query i see key j when 0 <= i - j < window.",
                {"layer": one.layer, "visible": count, "declared": window},
            )
            return
        if bool(wrong.any()):
            if sparse:
                why = f"keys are hidden in {one.location}; the config declares {', '.join(sparse)}, not understood here"
                yield Finding.skip("over_mask/pattern", why)
                return
            yield _over_mask(one, wrong)
            return
    if subject.facts.window is not None:
        yield Finding("window/count", Verdict.PASS, why="as many keys visible as declared")
    yield Finding("over_mask/pattern", Verdict.PASS, 0.0, 0.0, "every key that should be visible is")


def _full_by_turns(seen: list[Seen]) -> set[int]:
    """Layers with full causal attention that alternate with layers that have exactly the declared window."""
    windowed, full = list[bool](), set[int]()
    for one in (one for one in seen if one.role == "self"):
        visible = ~hidden_keys(one.scores)
        causal = torch.ones(visible.shape[-2:], dtype=torch.bool).tril()
        if torch.equal(one.allowed, causal):
            return set()  # its window, if there is one, does not show at this length
        is_windowed, is_full = (torch.equal(visible, mask.expand_as(visible)) for mask in (one.allowed, causal))
        if is_windowed == is_full:
            return set()
        windowed.append(is_windowed)
        full |= {id(one)} if is_full else set()
    return full if alternate(windowed) else set()


def sparse_fields(subject: Subject) -> list[str]:
    """Fields of the config that speak of attention that leaves keys out, beyond a window that is understood."""
    words = ("window", "local", "chunk", "sparse", "dilat", "index_topk", "indexer")
    raw, known = subject.facts.raw, subject.facts.window
    fields = [
        k for k, v in raw.items() if (any(v) if isinstance(v, list | tuple) else v) and v != known and k != "windows"
    ]
    return [k for k in fields if any(word in k.lower() for word in words)]


def _over_mask(one: Seen, wrong: Tensor) -> Finding:
    _, _, query, key = (int(v) for v in wrong.nonzero()[-1])
    heads = sorted({int(h) for h in wrong.nonzero()[:, 1].unique()})
    share = float(wrong.float().sum() / one.allowed.expand_as(wrong).float().sum())
    who = "every head" if len(heads) == wrong.shape[1] and len(heads) > 1 else f"head {heads[0]}"
    return Finding(
        "over_mask/pattern",
        Verdict.FAIL,
        share,
        0.0,
        f"in {one.location}, {who}, query {query} cannot see {'source ' if one.role == 'cross' else ''}token {key}: "
        f"{share:.0%} of what should be visible is masked, and no window is declared",
        "Mask only the future and padding (decoder: key <= query, itself included; encoder and source: nothing).",
        {"layer": one.layer, "heads": heads, "query": query, "key": key},
    )
