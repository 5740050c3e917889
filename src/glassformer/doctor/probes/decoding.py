"""generate() picks what the model's own logits say: with a cache, without one, padded, and with a draft."""

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from glassformer.doctor.probes.padding import amounts, pad_fill, padded
from glassformer.doctor.subject.measure import rms
from glassformer.doctor.subject.subject import Subject
from glassformer.finding import Finding, Verdict

COUNTS = ("max_new_tokens", "n", "n_new", "new_tokens", "num_tokens", "steps", "n_tokens", "length", "num_new_tokens")
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
        if callable(self.method):
            try:
                self.names = list(inspect.signature(self.method).parameters)
            except (TypeError, ValueError):
                self.method = None
        self.count = next((n for n in COUNTS if n in self.names), None)

    @property
    def usable(self) -> bool:
        return self.method is not None and self.count is not None

    def __call__(self, isolated: Subject, prompt: Tensor, n: int, **given: Any) -> Tensor:
        arguments = {str(self.count): n, **{k: v for k, v in given.items() if k in self.names}}
        for name, value in (("do_sample", False), ("top_k", 1)):
            if name in self.names:
                arguments[name] = value
        out = isolated.model.generate(prompt.clone(), **arguments)
        out = getattr(out, "sequences", out[0] if isinstance(out, tuple) else out)
        if not isinstance(out, Tensor) or out.dim() != 2:
            raise RuntimeError("generate() gives no (B,T) tensor of tokens")
        return out


def shortfall(isolated: Subject, tokens: Tensor, start: int, **given: Any) -> tuple[float, int | None]:
    """How far chosen tokens' logits lie below the largest, over the logits' size; and the first position that is short.

    The sequence is forced through plain forwards, so one wrong choice does not blame those after it.
    """
    logits = isolated.logits(tokens[:, :-1], **given)
    logits = logits[..., : isolated.vocab_size]
    chosen = logits.gather(-1, tokens[:, 1:, None])[..., 0]
    short = (logits.amax(-1) - chosen)[:, start - 1 :] / max(rms(logits), 1e-12)
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
    with subject.isolated(subject.warmth) as isolated:
        prompt = _prompt(isolated, 2, 3)
        if not torch.equal(generate(isolated, prompt, 6), generate(isolated, prompt, 6)):
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
    if subject.interface.mask is not None and "attention_mask" in generate.names and subject.kind == "decoder":
        yield from _padded(subject, generate)
    if "draft" in generate.names:
        yield _drafted(subject, generate)


def _prompt(isolated: Subject, rows: int, length: int) -> Tensor:
    return isolated.source(rows) if isolated.kind == "seq2seq" else isolated.tokens(rows, length, seed=41 + length)


def _run(subject: Subject, generate: Generator, name: str, lengths: tuple[int, ...], **given: Any) -> Finding:
    worst, ok = 0.0, list[int]()
    for length in lengths:
        new = 8
        length = min(length, subject.limit - new - 1)
        if length < 1:
            continue
        with subject.isolated(subject.warmth) as isolated:
            prompt = _prompt(isolated, 2, length)
            out = generate(isolated, prompt, new, **given)
            if isolated.kind == "seq2seq":
                short, first = shortfall(isolated, out, 1, source=prompt)
            elif out.shape[1] == length + new and torch.equal(out[:, :length], prompt):
                short, first = shortfall(isolated, out, length)
            elif out.shape[1] == new:
                short, first = shortfall(isolated, torch.cat([prompt, out], dim=1), length)
            else:
                short, first = float("inf"), 0
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


def _padded(subject: Subject, generate: Generator) -> Iterator[Finding]:
    """Each row of a padded batch continues as its own logits say."""
    for side in ("left", "right"):
        id, new = f"decode_select/padded-{side}", 5
        try:
            with subject.isolated(subject.warmth) as isolated:
                batch = padded(isolated, isolated.length(12), amounts(isolated, 0, 3, 6), side, pad_fill(isolated))
                out = generate(isolated, batch.tokens, new, attention_mask=isolated._mask(batch.mask))
                fresh, worst = out[:, -new:], 0.0
                for b, row in enumerate(batch.rows):
                    whole = torch.cat([row, fresh[b : b + 1]], dim=1)
                    # after right padding the later tokens stand behind a gap, which is no longer the row alone
                    last = whole.shape[1] if side == "left" else row.shape[1] + 1
                    worst = max(worst, shortfall(isolated, whole[:, :last], row.shape[1])[0])
        except Exception as error:
            yield Finding.skip(id, f"a padded batch does not generate: {' '.join(str(error).split())[:80]}")
            continue
        yield Finding.judge(id, worst, SLACK, "each padded row continues as its own logits say", REMEDY, side=side)


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
