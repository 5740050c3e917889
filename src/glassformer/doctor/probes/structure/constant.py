"""Logits depend on the tokens. Where they do not, every other comparison agrees and means nothing."""

import torch

from glassformer.doctor.subject.errors import CannotExamineError
from glassformer.doctor.subject.isolate import quiet
from glassformer.doctor.subject.measure import gap
from glassformer.doctor.subject.subject import Subject
from glassformer.finding import Finding, Verdict

ID = "constant_logits/other-tokens"


def constant_logits(subject: Subject) -> Finding | None:
    """A failure if other tokens give the same logits, else None.

    Raises CannotExamineError where a matrix of zeros is the reason: a head may start at zero, and a model that has not
    been trained cannot be examined then.
    """
    with quiet(), subject.isolated() as isolated:
        tokens = isolated.tokens(2, isolated.length(24), seed=3)
        seq2seq = isolated.kind == "seq2seq"
        given = [{"source": isolated.source(2, seed=seed)} if seq2seq else {} for seed in (77, 78)]
        one = isolated.logits(tokens, **given[0])
        two = isolated.logits(isolated.other(tokens), **given[1])
    # a model that draws random numbers moves by itself, and NaN is a finding of its own
    if gap(one, two) > 0 or not bool(torch.isfinite(one).all()):
        return None
    values = one.detach()
    if bool((values == values.flatten()[0]).all()):
        how = f"every logit is {float(values.flatten()[0]):.4g}"
    else:
        alike = bool((values == values[:, :1]).all())
        how = "the same vector at every position" if alike else "only the position changes them"
    empty = _zero_matrices(subject)
    if empty:
        raise CannotExamineError(
            f"{subject.name} returns the same logits for different tokens ({how}); they must depend on the input to be "
            f"examined: {empty[-1]} is all zero, so load trained weights or initialise it with other numbers."
        )
    remedy = "Compute the logits from the token ids: head(x) with the x that the layers return, not a constant."
    return Finding(ID, Verdict.FAIL, 0.0, None, f"other tokens give the same logits: {how}", remedy)


def _zero_matrices(subject: Subject) -> list[str]:
    if subject.module is None:
        return []
    return [n for n, p in subject.module.named_parameters() if p.dim() > 1 and not bool(p.any())]
