"""generate() picks what the model's own logits say: with a cache, without one, padded, and with a draft.

What follows an end of text in a row is not judged: generate() may stop there, or fill up with padding.
"""

import copy
import inspect
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from glassformer.doctor.probes.masking import LEAK
from glassformer.doctor.probes.modes import KEPT
from glassformer.doctor.probes.padding import Padded, amounts, pad_fill, padded
from glassformer.doctor.subject.interface import SOURCE_MASK
from glassformer.doctor.subject.measure import gap, rms, same_shape_bound
from glassformer.doctor.subject.snapshot import seed_torch
from glassformer.doctor.subject.subject import Subject
from glassformer.finding import Finding, Verdict

COUNTS = ("max_new_tokens", "n", "n_new", "new_tokens", "num_tokens", "steps", "n_tokens", "length", "num_new_tokens",
          "max_new", "n_steps", "num_steps", "max_steps", "count")  # fmt: skip
LENGTH = re.compile(r"len|steps|tokens|count")
ENDS = re.compile(r"^(eos|end|stop|eot)_?\w*(id|ids|index|idx|token|tokens)?$")
STARTS = re.compile(r"^(bos|sos|start|decoder_start)(_token)?(_id|_idx|_index)?$")
SLACK = 1e-3
"""Of the logits' size: a choice this close to the largest logit is a tie that rounding decides."""
REMEDY = (
    "Take argmax of the logits at the last real position of each row; accept a draft only up to the first disagreement."
)
CONTEXT = (
    "generate() reads another context or other positions than training does: crop only at the model's full length."
)


class Generator:
    """A subject's own generate, asked to be greedy."""

    def __init__(self, subject: Subject):
        self.method = getattr(subject.model, "generate", None)
        self.names: list[str] = []
        required: list[str] = []
        if callable(self.method):
            try:
                parameters = inspect.signature(self.method).parameters
            except (TypeError, ValueError):
                self.method = None
            else:
                self.names = list(parameters)
                required = [n for n, p in parameters.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
        self.count = next((n for n in COUNTS if n in self.names), None)
        if self.count is None:  # what must be given next to the prompt, or is called a length
            others = [n for n in self.names[1:] if not STARTS.match(n) and "mask" not in n and "cache" not in n]
            self.count = next((n for n in others if n in required or LENGTH.search(n)), None)
        self.total = False
        """Whether the count is that of the whole sequence; found by trying."""
        self.mask = None
        if subject.kind == "seq2seq" and subject.interface.source_mask is not None:
            self.mask = next(
                (n for n in (subject.interface.source_mask, *SOURCE_MASK, "mask") if n in self.names), None
            )
        elif subject.interface.mask in self.names:
            self.mask = subject.interface.mask
        ids = {name: value for name, value in subject.facts.raw.items() if isinstance(value, int) and value >= 0}
        self.ends = {value for name, value in ids.items() if ENDS.match(name) and value is not True}
        self.start = next((value for name, value in ids.items() if STARTS.match(name)), None)
        self.fixed = {n: 1 if self.start is None else self.start for n in required[1:] if STARTS.match(n)}

    @property
    def usable(self) -> bool:
        return self.method is not None and self.count is not None

    def __call__(self, isolated: Subject, prompt: Tensor, n: int, seed: int = 0, **given: Any) -> Tensor:
        n += prompt.shape[1] if self.total and isolated.kind != "seq2seq" else 0
        given = {name: value for name, value in given.items() if name in self.names}
        arguments = {**self.fixed, str(self.count): n, **given, **self.greedy()}
        seed_torch(seed)
        out = isolated.model.generate(prompt.clone(), **arguments)
        out = getattr(out, "sequences", out[0] if isinstance(out, tuple) else out)
        if not isinstance(out, Tensor) or out.dim() != 2:
            raise RuntimeError("generate() gives no (B,T) tensor of tokens")
        return out

    def greedy(self) -> dict[str, Any]:
        """Arguments that ask for the most likely tokens, of those that it takes."""
        wanted = {"do_sample": False, "top_k": 1, "sample": False, "greedy": True}
        return {name: value for name, value in wanted.items() if name in self.names}

    def whole(self, isolated: Subject, prompt: Tensor, out: Tensor, new: int) -> tuple[Tensor, int] | None:
        """The sequence that generate() made, and where its first new token is; None where it made another one."""
        length = prompt.shape[1]
        if isolated.kind == "seq2seq":
            started = self.start is not None and bool((out[:, 0] == self.start).all())
            if out.shape[1] > new or started or self.start is None:
                return out, 1
            return torch.cat([torch.full_like(out[:, :1], self.start), out], dim=1), 1
        if out.shape[1] > length and torch.equal(out[:, :length], prompt) and self._ended(out[:, length:], new):
            return out, length
        return (torch.cat([prompt, out], dim=1), length) if self._ended(out, new) else None

    def _ended(self, fresh: Tensor, new: int) -> bool:
        """Whether there are as many new tokens as wanted, or fewer because every row has ended."""
        over = torch.tensor([[int(i) in self.ends for i in row] for row in fresh])
        return fresh.shape[1] == new or (fresh.shape[1] < new and bool(over.any(1).all()))


def shortfall(
    isolated: Subject, tokens: Tensor, start: int, ends: set[int] | None = None, **given: Any
) -> tuple[float, int | None]:
    """How far chosen tokens' logits lie below the largest, over the logits' size; and the first position that is short.

    The sequence is forced through plain forwards, so one wrong choice does not blame those after it. What follows one
    of the ids `ends` among the chosen tokens is left out.
    """
    logits = isolated.logits(tokens[:, :-1], **given)
    logits = logits[..., : isolated.vocab_size]
    chosen = logits.gather(-1, tokens[:, 1:, None])[..., 0]
    short = (logits.amax(-1) - chosen)[:, start - 1 :] / max(rms(logits), 1e-12)
    if ends:
        fresh = tokens[:, start:]
        over = torch.isin(fresh, torch.tensor(sorted(ends), device=fresh.device)).long()
        short = short.masked_fill(over.cumsum(1) - over > 0, 0.0)
    bad = (short > SLACK).any(0).nonzero()
    return float(short.max()), (int(bad[0]) if len(bad) else None)


def greedy_is_greedy(subject: Subject) -> Iterator[Finding]:
    """Short and long prompts, cache on and off, padding, drafts."""
    id, generate = "decode_select/greedy", Generator(subject)
    if subject.kind == "encoder" or not generate.usable:
        yield Finding.skip(id, "the model has no generate() with a number of new tokens")
        return
    if subject.interface.library:
        yield Finding.skip(id, "generate() belongs to its library, not to the model")
        return
    samples = _samples(subject, generate)
    kept = _nothing_is_kept(subject, generate, samples)
    yield kept
    if kept.verdict is Verdict.FAIL:
        return
    if samples:
        yield Finding.skip(id, "generate() samples, and cannot be asked to be greedy")
        return
    uncached = _run(subject, generate, "plain", lengths=(3, 40), use_cache=False)
    yield uncached
    if uncached.verdict is Verdict.FAIL:
        return
    if "use_cache" in generate.names:
        cached = _run(subject, generate, "cached", lengths=(3, 40), use_cache=True)
        yield cached
        if cached.verdict is Verdict.FAIL:
            return
    if generate.mask is not None:
        yield from _either_side(list(_padded(subject, generate)))
    if "draft" in generate.names:
        yield _drafted(subject, generate)


def _samples(subject: Subject, generate: Generator) -> bool:
    """Whether the random state decides what a fresh model generates."""
    outs = []
    with subject.isolated(subject.warmth) as isolated:
        prompt = _prompt(isolated, 2, 3)
        out = generate(isolated, prompt, 6)
        generate.total = isolated.kind != "seq2seq" and out.shape[1] == 6 and torch.equal(out[:, :3], prompt)
    for seed in (0, 1, 2):
        with subject.isolated(subject.warmth) as isolated:
            outs.append(generate(isolated, _prompt(isolated, 2, 3), 6, seed=seed))
    return any(out.shape != outs[0].shape or not torch.equal(out, outs[0]) for out in outs[1:])


def _nothing_is_kept(subject: Subject, generate: Generator, samples: bool) -> Finding:
    """A, then B: what generate() gives for B, and the logits afterwards, are those of a model that has not seen A.

    Prompts of one and of several lengths: a cache that is kept may be made anew when its size changes. Tokens of a
    model that samples are not compared, because it may keep a random generator of its own.
    """
    id, why = "state_leak/generate", "after generate(), prompts and logits give what they give without it"
    for first, second in ((7, 7), (9, 4)):
        with subject.isolated(subject.warmth) as isolated, subject.isolated(subject.warmth) as fresh:
            one, two = (_prompt(isolated, 2, n, seed) for n, seed in ((first, 61), (second, 62)))
            tokens = isolated.tokens(2, isolated.length(9), seed=63)
            expected, logits = generate(fresh, two, 5), isolated.logits(tokens)
            generate(isolated, one, 5)
            found, moved = generate(isolated, two, 5), gap(isolated.logits(tokens), logits)
        if not samples and (found.shape != expected.shape or not torch.equal(found, expected)):
            why = "generate() gives other tokens for a prompt after it was called with another one"
            return Finding(id, Verdict.FAIL, 1.0, 0.0, why, KEPT, {"prompts": [first, second]})
        if moved > same_shape_bound(logits):
            why = "the model gives other logits after a call of generate()"
            return Finding(id, Verdict.FAIL, moved, same_shape_bound(logits), why, KEPT)
    return Finding(id, Verdict.PASS, 0.0, 0.0, why)


def _prompt(isolated: Subject, rows: int, length: int, seed: int = 41) -> Tensor:
    if isolated.kind == "seq2seq":
        return isolated.source(rows, seed=77 if seed == 41 else seed)
    return isolated.tokens(rows, min(length, isolated.limit), seed=seed + length)


def _run(subject: Subject, generate: Generator, name: str, lengths: tuple[int, ...], **given: Any) -> Finding:
    worst, ok = 0.0, list[int]()
    for length in lengths:
        new = 8
        length = min(length, subject.limit - new - 1)
        if length < 1:
            continue
        with subject.isolated(subject.warmth) as isolated:
            prompt = _prompt(isolated, 2, length)
            made = generate.whole(isolated, prompt, generate(isolated, prompt, new, **given), new)
            source: dict[str, Any] = {"source": prompt} if isolated.kind == "seq2seq" else {}
            short: float = torch.inf
            first: int | None = 0
            if made is not None:
                short, first = shortfall(isolated, *made, generate.ends, **source)
        worst = max(worst, short)
        if first is not None:
            context = name == "plain" and bool(ok)
            id = "position_train_infer/generate" if context else f"decode_select/{name}"
            why = f"with a prompt of {length}, new token {first} is not the argmax of the model's own logits"
            why += f" (prompts of {ok[0]} are right)" if context else ""
            evidence = {"prompt": length, "first": first, **{k: v for k, v in given.items() if isinstance(v, bool)}}
            return Finding(id, Verdict.FAIL, short, SLACK, why, CONTEXT if context else REMEDY, evidence)
        ok.append(length)
    return Finding(
        f"decode_select/{name}", Verdict.PASS, worst, SLACK, "each new token has the largest logit, up to ties"
    )


def _either_side(findings: list[Finding]) -> Iterator[Finding]:
    """A generate() that continues prompts padded on one side asks its caller to pad there: a convention, not a bug."""
    works = [f.evidence["side"] for f in findings if f.passed]
    for finding in findings:
        if works and finding.id.startswith("decode_select") and finding.verdict is Verdict.FAIL:
            why = f"generate() continues prompts that are padded on the {works[0]}, not on the other side: pad there"
            finding = replace(finding, verdict=Verdict.SKIP, why=why, evidence={**finding.evidence, "explained": True})
        yield finding


def _padded(subject: Subject, generate: Generator) -> Iterator[Finding]:
    """Each row of a padded batch continues as its own logits say; in an encoder-decoder the sources are padded.

    Where the content of left padding of a prompt, or of padding of a source, moves the logits that generate() computes,
    the mask does not arrive; tokens may be the same all the same. After right padding of a prompt, the logits at the
    last position are those of padding.
    """
    for side in ("left", "right"):
        id = f"decode_select/padded-{side}"
        if side == "left" and subject.kind == "seq2seq":
            continue  # a source with absolute positions cannot be padded there
        try:
            with subject.isolated(subject.warmth) as isolated:
                own = padded(isolated, isolated.length(12), amounts(isolated, 0, 3, 6), side, pad_fill(isolated))
                # not the padding id, from which a model may count positions
                junk = [isolated.other(own.tokens, seed) for seed in (5, 6)]
                others = [replace(own, tokens=torch.where(own.mask, own.tokens, tokens)) for tokens in junk]
                outs, *heard = (_continued(isolated, generate, batch) for batch in (own, *others))
                worst = max(_row_short(isolated, generate, own, outs[0], b) for b in range(len(own.rows)))
                moved, bound = _moved(heard[0][1], heard[1][1])
        except Exception as error:
            yield Finding.skip(id, f"a padded batch does not generate: {' '.join(str(error).split())[:80]}")
            continue
        if moved > bound and (side == "left" or subject.kind == "seq2seq"):
            why = (
                "logits inside generate() move when only the content of padding changes: it drops the mask it is given"
            )
            yield Finding("pad_leak/generate", Verdict.FAIL, moved, bound, why, LEAK, {"side": side})
            continue
        yield Finding.judge(id, worst, SLACK, "each padded row continues as its own logits say", REMEDY, side=side)


NEW = 5
"""Tokens that follow a padded prompt."""


class Overheard(TorchFunctionMode):
    """Keeps the logits of the last position that are computed meanwhile: results as wide as the vocabulary."""

    def __init__(self, rows: int, vocab_size: int):
        super().__init__()
        self.rows, self.vocab_size, self.logits = rows, vocab_size, list[Tensor]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        fits = isinstance(out, Tensor) and out.is_floating_point() and out.dim() in (2, 3)
        if fits and (len(out), out.shape[-1]) == (self.rows, self.vocab_size):
            self.logits.append(out.detach().clone() if out.dim() == 2 else out[:, -1].detach().clone())
        return out


def _moved(one: list[Tensor], two: list[Tensor]) -> tuple[float, float]:
    """The largest difference of logits that two runs computed one after the other, as long as they chose alike."""
    most, bound = 0.0, torch.inf
    for a, b in zip(one, two, strict=False):
        if a.shape != b.shape:
            break
        most, bound = max(most, gap(a, b)), min(bound, same_shape_bound(a))
        if not torch.equal(a.argmax(-1), b.argmax(-1)):
            break
    return most, bound


def _continued(isolated: Subject, generate: Generator, batch: Padded) -> tuple[Tensor, list[Tensor]]:
    """The new tokens of each row, in an encoder-decoder after its first token; and the logits overheard."""
    with Overheard(len(batch.tokens), isolated.vocab_size) as heard:
        given: dict[str, Any] = {str(generate.mask): isolated._mask(batch.mask)}
        out = generate(isolated, batch.tokens, NEW, **given)
    if isolated.kind != "seq2seq":
        return out[:, -NEW:], heard.logits
    made = generate.whole(isolated, batch.tokens, out, NEW)
    assert made is not None
    return made[0], heard.logits


def _row_short(isolated: Subject, generate: Generator, batch: Padded, out: Tensor, b: int) -> float:
    row = batch.rows[b]
    if isolated.kind == "seq2seq":
        return shortfall(isolated, out[b : b + 1], 1, generate.ends, source=row)[0]
    whole = torch.cat([row, out[b : b + 1]], dim=1)
    # after right padding the later tokens stand behind a gap, which is no longer the row alone
    last = whole.shape[1] if batch.side == "left" else row.shape[1] + 1
    return shortfall(isolated, whole[:, :last], row.shape[1], generate.ends)[0]


def _drafted(subject: Subject, generate: Generator) -> Finding:
    """Speculative decoding gives the greedy tokens, whether the draft is always right, sometimes, or never."""
    worst, first = 0.0, None
    for noise in (0.0, 0.05, 1.0):
        with subject.isolated(subject.warmth) as isolated:
            draft = copy.deepcopy(isolated.model)
            generator = torch.Generator().manual_seed(43)
            for parameter in draft.parameters():
                if parameter.dim() >= 2:
                    scale = float(parameter.std()) * noise
                    parameter.add_(scale * torch.randn(parameter.shape, generator=generator).to(parameter))
            for rows, length in ((1, 3), (2, 9)):
                prompt = _prompt(isolated, rows, length)
                out = generate(isolated, prompt, 10, draft=draft)
                short, bad = shortfall(isolated, out, length) if out.shape[1] == length + 10 else (float("inf"), 0)
                if short > worst:
                    worst, first = short, bad
    return Finding.judge(
        "decode_select/draft", worst, SLACK, "speculative tokens are the greedy ones", REMEDY, first=first
    )
