"""Experiments that compare logits: causality, cache, padding, batch, modes."""

from typing import Any

from glassformer.doctor.probes.caching import CROPS, REORDERS
from glassformer.doctor.reproduce.experiment import APART, SAME, Experiment


def future(e: Experiment) -> list[str]:
    """Tokens after a cut are replaced; logits up to it must stay."""
    length, cut = e.get("length", 24), e.get("cut", 10)
    mask = ""
    if "with-mask" in e.finding.id:
        mask = f", {e.needs('mask')}={e.calls.mask('torch.ones_like(tokens, dtype=torch.bool)')}"
    lines = ["model.train()", "torch.manual_seed(0)"] if "train-mode" in e.finding.id else []
    seed = ["torch.manual_seed(0)"] if lines else []
    return [
        *lines,
        f"tokens, cut = draw({e.get('rows', 2)}, {length}, seed=1), {cut}",
        "changed = tokens.clone()",
        f"changed[:, cut + 1 :] = draw({e.get('rows', 2)}, {length}, seed=2)[:, cut + 1 :]",
        f"a = logits(tokens{mask})[:, : cut + 1]",
        *seed,
        f"b = logits(changed{mask})[:, : cut + 1]",
        APART,
        SAME,
    ]


def pieces(e: Experiment) -> list[str]:
    """Through a cache in pieces, and in one pass."""
    sizes, rows = e.get("pieces", [3, *[1] * 9]), e.get("rows", 2)
    return [
        f"pieces = {sizes}",
        f"tokens = draw({rows}, sum(pieces), seed=1)",
        "b = logits(tokens)",
        "a, _ = cached(tokens, pieces)",
        APART,
        e.rounding,
    ]


def rollback(e: Experiment) -> list[str]:
    return [
        "tokens, junk = draw(2, 14, seed=1), draw(2, 14, seed=2)",
        "_, cache = cached(tokens, [9])",
        "_, cache = cached(junk, [5], cache, start=9)",
        *_crop(e),
        "a, _ = cached(tokens, [1, 1, 3], cache, start=9)",
        "b = logits(tokens)[:, 9:]",
        APART,
        e.rounding,
    ]


def _crop(e: Experiment) -> list[str]:
    cache = _a_cache(e)
    name = next((n for n in CROPS if callable(getattr(cache, n, None))), None)
    if name is None:
        raise LookupError("its cache has no crop")
    foreign = type(cache).__module__.startswith("transformers.")
    return [f"cache.{name}({-5 if foreign else 9})  # back to the first 9 tokens"]


def _a_cache(e: Experiment) -> Any:
    _, cache = e.subject.call(e.subject.tokens(2, 5), cache=e.subject.new_cache(2), with_cache=True)
    return cache


def reorder(e: Experiment) -> list[str]:
    cache = _a_cache(e)
    name = next((n for n in REORDERS if callable(getattr(cache, n, None))), None)
    if name is None:
        raise LookupError("its cache has no reorder")
    source = ", source=source" if e.subject.kind == "seq2seq" else ""
    return [
        *(["source = draw(3, 11, seed=77)"] if source else []),
        "tokens, order = draw(3, 11, seed=1), torch.tensor([2, 0, 1])",
        f"_, cache = cached(tokens, [6]{source})",
        f"cache.{name}(order)",
        "tokens = torch.cat([tokens[order, :6], tokens[:, 6:]], 1)",
        *(["source = source[order]"] if source else []),
        f"a, _ = cached(tokens, [1, 1, 3], cache, start=6{source})",
        f"b = logits(tokens{source})[:, 6:]",
        APART,
        e.rounding,
    ]


def padded_tokens(e: Experiment, side: str) -> list[str]:
    amounts = "torch.tensor([[3], [8]])"
    mask = f"torch.arange(19) >= {amounts}" if side == "left" else f"torch.arange(19) < 19 - {amounts}"
    lines = [
        f"real = {mask}  # 3 and 8 tokens of padding on the {side}",
        f"tokens = torch.where(real, draw(2, 19, seed=1), {e.pad})",
        f"given = {{{e.needs('mask')!r}: {e.calls.mask('real')}}}",
    ]
    if e.subject.interface.positions_from_caller and e.subject.kind != "encoder" and side == "left":
        lines.append(f"given[{e.subject.interface.positions!r}] = (real.long().cumsum(1) - 1).clamp(min=0)")
    return lines


def padding_content(e: Experiment) -> list[str]:
    side = e.get("side", "left")
    return [
        *padded_tokens(e, side),
        "junk = torch.where(real, tokens, draw(2, 19, seed=2))",
        "a, b = logits(tokens, **given)[real], logits(junk, **given)[real]",
        APART,
        SAME,
    ]


def padding_amount(e: Experiment) -> list[str]:
    side = e.get("side", "left")
    return [
        *padded_tokens(e, side),
        "together, measured = logits(tokens, **given), 0.0",
        "for row in range(2):",
        "    a, b = together[row][real[row]], logits(tokens[row][real[row]][None])[0]",
        "    measured = max(measured, float((a - b).abs().nan_to_num(nan=torch.inf).max()))",
        e.rounding,
    ]


def source_content(e: Experiment) -> list[str]:
    side, name = e.get("side", "right"), e.needs("source_mask")
    mask = "torch.arange(11) >= 4" if side == "left" else "torch.arange(11) < 7"
    return [
        f"tokens, real = draw(2, 9, seed=1), ({mask}).expand(2, -1)  # 4 tokens of padding on the {side} of the source",
        f"source = torch.where(real, draw(2, 11, seed=3), {e.pad})",
        "junk = torch.where(real, source, draw(2, 11, seed=4))",
        f"given = {{{name!r}: {e.calls.mask('real')}}}",
        "a, b = logits(tokens, source=source, **given), logits(tokens, source=junk, **given)",
        APART,
        SAME,
    ]


def source_order(e: Experiment) -> list[str]:
    """Without positions the order of the source does not matter: cross-attention sees a set."""
    return [
        "tokens, source = draw(2, 9, seed=1), draw(2, 11, seed=2)",
        "a, b = logits(tokens, source=source), logits(tokens, source=source.flip(1))",
        "moved, size = float((a - b).abs().max()), float(a.square().mean().sqrt())",
        'print(f"the reversed source moves logits of size {size:.3g} by {moved:.3g}")',
        "measured, bound = int(moved <= 1e-5 * size), 0  # 1 if the order of the source does not matter",
    ]


def not_finite(e: Experiment) -> list[str]:
    dtype = next((d for d in ("bfloat16", "float16") if d in e.finding.id), None)
    cast = [f"model.to(torch.{dtype})"] if dtype else []
    if "padded" not in e.finding.id:
        return [*cast, "a = logits(draw(2, 16, seed=1))", *NOT_FINITE]
    return [*cast, *padded_tokens(e, "left"), "a = logits(tokens, **given)[real]", *NOT_FINITE]


NOT_FINITE = ["measured, bound = int((~torch.isfinite(a)).sum()), 0  # logits that are NaN or infinite"]


def neighbour(e: Experiment) -> list[str]:
    return [
        "tokens = draw(3, 24, seed=1)",
        "changed = tokens.clone()",
        "changed[1:] = draw(3, 24, seed=2)[1:]",
        "a, b = logits(tokens)[0], logits(changed)[0]  # the first sequence is the same",
        APART,
        SAME,
    ]


def twice(e: Experiment) -> list[str]:
    return ["tokens = draw(2, 24, seed=1)", "a, b = logits(tokens), logits(tokens)", APART, SAME]


def after_others(e: Experiment) -> list[str]:
    long = min(e.subject.limit, 65)
    return [
        "tokens = draw(2, 13, seed=1)",
        "a = logits(tokens)",
        f"logits(draw(3, {long}, seed=2))",
        "logits(draw(1, 2, seed=3))",
        "b = logits(tokens)",
        APART,
        SAME,
    ]


def modes(e: Experiment) -> list[str]:
    return [
        "for module in model.modules():",
        "    if isinstance(module, torch.nn.Dropout):",
        "        module.p = 0.0",
        f"tokens = draw(2, {e.get('length', 24)}, seed=1)",
        "a = logits(tokens)",
        "model.train()",
        "b = logits(tokens)",
        APART,
        e.rounding,
    ]


def constant(e: Experiment) -> list[str]:
    return [
        "a, b = logits(draw(2, 12, seed=1)), logits(draw(2, 12, seed=2))",
        "measured, bound = int(torch.equal(a, b)), 0  # 1 if other tokens give the same logits",
    ]
