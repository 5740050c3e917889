"""The exact arithmetic of one cell: which row times which column, what is added, what comes out.

Every number is taken from the run itself and from the model's parameters; the result is computed again from the terms
shown, and stands beside the value that the model had there.
"""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from glassformer.studio import schema
from glassformer.studio.api.reading import Reading, read
from glassformer.studio.errors import StudioError
from glassformer.studio.mathml import mathml
from glassformer.studio.shelf import Shelf

if TYPE_CHECKING:
    from torch import Tensor

MOST_TERMS = 2048
"""Shown; the rest, the smallest products, are one number."""


@dataclass
class Arithmetic:
    """`value = scale * sum(a * b) + sum(added)`, unless `result` says otherwise."""

    formula: str
    a: "Tensor"
    b: "Tensor"
    labels: list[str]
    rows: tuple[str, str] = ("", "")
    """What a and b are."""
    scale: float = 1.0
    added: dict[str, float] = field(default_factory=dict)
    result: float | None = None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        a, b = self.a.double(), self.b.double()
        product = a * b
        keep = product.abs().argsort(descending=True)[:MOST_TERMS].sort().values
        rest = float(product.sum() - product[keep].sum())
        terms = [
            {"a": float(a[i]), "b": float(b[i]), "product": float(product[i]), "label": self.labels[i]}
            for i in keep.tolist()
        ]
        computed = self.scale * float(product.sum()) + sum(self.added.values()) if self.result is None else self.result
        facts = {"terms": terms, "n_terms": len(product), "rest": rest, "scale": self.scale, "added": self.added}
        words = {"a": self.rows[0], "b": self.rows[1], "formula": self.formula, "mathml": mathml(self.formula)}
        return {**facts, **words, "computed": computed, "note": self.note}


def cell(shelf: Shelf, asked: schema.Cell) -> dict[str, Any]:
    """One cell of a site of one run; `index` names all axes but the batch."""
    import torch

    from glassformer.lens.trace import missing_site, sites_of, trace

    reading = read(shelf, asked)
    known = sites_of(reading.model)
    if asked.site not in known:
        raise missing_site(reading.model.config, asked.site)
    stack, layer, name = _place(asked.site)
    if name == "logits" and reading.target is not None:
        stack = "decoder."
    wanted = [asked.site, f"{stack}final"]
    wanted += [site for site in known if layer is not None and site.startswith(f"{stack}block.{layer}.")]
    with torch.no_grad():
        run = trace(reading.model, reading.tokens, sites=wanted, **reading.given)
        value = run[asked.site][0]
        if len(asked.index) != value.dim() or any(i >= n for i, n in zip(asked.index, value.shape, strict=True)):
            raise StudioError(f"index {asked.index} is outside {asked.site}, which is {tuple(value.shape)} here.")
        at = _Place(reading, run, stack, layer, tuple(asked.index))
        shown = at.arithmetic(name).to_dict()
    letters = known[asked.site].letters.removeprefix("B,")
    held = float(value[tuple(asked.index)])
    facts = {"site": asked.site, "index": asked.index, "letters": letters, "shape": list(value.shape)}
    return {**facts, "value": held if math.isfinite(held) else None, **shown}


def _place(site: str) -> tuple[str, int | None, str]:
    """(stack, layer, rest) of a site: decoder.block.3.attention.q -> ("decoder.", 3, "attention.q")."""
    stack = next((p for p in ("encoder.", "decoder.") if site.startswith(p)), "")
    parts = site.removeprefix(stack).split(".")
    return (stack, int(parts[1]), ".".join(parts[2:])) if parts[0] == "block" else (stack, None, ".".join(parts))


class _Place:
    """One index of one site of one run."""

    def __init__(self, reading: Reading, run: Any, stack: str, layer: int | None, index: tuple[int, ...]):
        from glassformer.lens.residual import stack_of

        self.reading, self.run, self.stack, self.layer, self.index = reading, run, stack, layer, index
        self.model, self.config = reading.model, reading.model.config
        self.trunk: Any = stack_of(reading.model, stack)
        self.block: Any = None if layer is None else self.trunk.blocks[layer]

    def site(self, name: str) -> "Tensor":
        """A recorded tensor of this block (or of the stack), without the batch."""
        prefix = self.stack if self.layer is None else f"{self.stack}block.{self.layer}."
        return self.run[prefix + name][0]

    def arithmetic(self, name: str) -> Arithmetic:
        branch, _, part = name.rpartition(".")
        table: dict[str, Any] = {
            "q": self._projected, "k": self._projected, "v": self._value, "scores": self._score,
            "pattern": self._pattern, "heads": self._head, "pre": self._pre, "post": self._post,
        }  # fmt: skip
        if branch == "cross" and part in ("k", "v"):
            part = "memory"
        if part in table and branch:
            arithmetic: Arithmetic = table[part](branch, part)
            return arithmetic
        match name:
            case "embed":
                return self._embed()
            case "logits":
                return self._logit()
            case "final":
                return self._final()
            case "attention.out" | "cross.out":
                return self._out(branch)
            case "feedforward.out" if hasattr(self.block.feedforward, "down"):
                return self._linear(
                    r"y_{t,d} = \sum_f h_{t,f} W_{d,f} + b_d",
                    self.site("feedforward.post"),
                    self.block.feedforward.down,
                )
            case "attention.normed" | "feedforward.normed" | "cross.normed":
                return self._normed(branch)
            case "resid_pre" | "resid_mid" | "resid_post" if self.config.placement != "post":
                return self._stream(name)
        raise StudioError(f"{name} is not a sum of products that can be shown: choose another part.")

    def _linear(self, formula: str, x: "Tensor", module: Any, row: int | None = None) -> Arithmetic:
        """x[t] . W[row] + b[row]."""
        t, row = self.index[-2], self.index[-1] if row is None else row
        added = {} if module.bias is None else {"bias": float(module.bias[row])}
        labels = [f"component {i}" for i in range(x.shape[-1])]
        rows = (f"row {t} of the input", f"row {row} of the weight matrix")
        return Arithmetic(formula, x[t], module.weight[row], labels, rows, added=added)

    def _reads(self, branch: str) -> "Tensor":
        """What a branch reads: its norm's output, or the stream itself."""
        if self.config.placement == "parallel":
            return self.site("attention.normed")
        if self.config.placement == "pre":
            return self.site(f"{branch}.normed")
        if branch == "cross":
            raise StudioError("with placement='post' what cross-attention reads is no site: choose another part.")
        return self.site("resid_pre" if branch == "attention" else "resid_mid")

    def _projected(self, branch: str, part: str) -> Arithmetic:
        """Queries and keys: a row times a column, then a norm or a rotation where the model has one."""
        import torch

        attention = getattr(self.block, branch)
        head, t, i = self.index
        x = self._reads(branch)
        positions = torch.arange(x.shape[0])[None]
        # cross-attention knows no positions
        infusion = None if branch == "cross" else self.trunk.position.infusion(positions, x.dtype)
        x = x if infusion is None else x + infusion[0]
        module, norm = getattr(attention, part), getattr(attention, f"{part}_norm")
        width = self.config.d_head
        rotation = None if branch == "cross" else self.trunk.position.rotation(positions, x.dtype, x.shape[0] - 1)
        whole = (x[t] @ module.weight[head * width : (head + 1) * width].T).double()
        if module.bias is not None:
            whole = whole + module.bias[head * width : (head + 1) * width]
        if rotation is not None and i < 2 * rotation.cos.shape[-1]:
            return self._turned(part, whole if norm is None else norm(whole.to(x.dtype)).double(), rotation, t, i)
        if norm is not None:
            return _norm_cell(norm, whole.to(x.dtype), i)
        return self._linear(rf"{part}_{{h,t,i}} = \sum_d x_{{t,d}} W_{{hK+i,d}} + b", x, module, head * width + i)

    def _turned(self, part: str, z: "Tensor", rotation: Any, t: int, i: int) -> Arithmetic:
        """One component of a rotated pair: a cos - b sin, or a sin + b cos."""
        import torch

        half = rotation.cos.shape[-1]
        pair, second = (i % half, i >= half) if rotation.pairing == "halves" else (i // 2, i % 2 == 1)
        first, other = (pair, pair + half) if rotation.pairing == "halves" else (2 * pair, 2 * pair + 1)
        cos, sin = float(rotation.cos[0, 0, t, pair]), float(rotation.sin[0, 0, t, pair])
        turn = torch.tensor([sin, cos] if second else [cos, -sin], dtype=torch.float64)
        rule = r"a \sin\theta + b \cos\theta" if second else r"a \cos\theta - b \sin\theta"
        labels = [f"component {first} before the rotation", f"component {other} before the rotation"]
        rows = ("the pair before the rotation", f"cosine and sine of the angle of position {t}")
        return Arithmetic(rf"{part}_{{h,t,i}} = {rule}", torch.stack([z[first], z[other]]), turn, labels, rows)

    def _value(self, branch: str, part: str) -> Arithmetic:
        head, _, i = self.index
        module = getattr(self.block, branch).v
        row = head * self.config.d_value + i
        return self._linear(r"v_{g,s,i} = \sum_d x_{s,d} W_{gU+i,d} + b", self._reads(branch), module, row)

    def _score(self, branch: str, part: str) -> Arithmetic:
        import torch

        h, t, s = self.index
        q, k = self.site(f"{branch}.q"), self.site(f"{branch}.k")
        g = h // (q.shape[0] // k.shape[0])
        added: dict[str, float] = {}
        if branch == "attention":
            places = torch.arange(k.shape[1])[None]
            bias = self.trunk.position.bias(places, places, q.dtype)
            if bias is not None:
                added["position bias"] = float(bias[0, h, t, s])
        hidden = bool(self.site(f"{branch}.scores")[h, t, s].isinf())
        note = f"place {t} may not look at place {s}: the score is minus infinity." if hidden else ""
        formula = r"s_{h,t,s} = c \sum_i q_{h,t,i} k_{g,s,i}" + (" + b_{h,t,s}" if added else "")
        rows = (f"query of head {h}, place {t}", f"key of head {g}, place {s}")
        labels = [f"component {i}" for i in range(q.shape[-1])]
        scale = getattr(self.block, branch).scale
        return Arithmetic(formula, q[h, t], k[g, s], labels, rows, scale, added, None, note)

    def _pattern(self, branch: str, part: str) -> Arithmetic:
        h, t, s = self.index
        scores = self.site(f"{branch}.scores")[h, t].double()
        weights = (scores - scores.max()).exp()
        total = weights.sum()
        labels = [f"place {i}" for i in range(len(scores))]
        rows = ("exp(score - largest score)", "1 / the sum of them all")
        formula = r"A_{h,t,s} = \frac{e^{s_{h,t,s}}}{\sum_r e^{s_{h,t,r}}}"
        return Arithmetic(
            formula, weights, (1 / total).expand_as(weights), labels, rows, result=float(weights[s] / total)
        )

    def _head(self, branch: str, part: str) -> Arithmetic:
        h, t, u = self.index
        pattern, v = self.site(f"{branch}.pattern"), self.site(f"{branch}.v")
        g = h // (pattern.shape[0] // v.shape[0])
        labels = [f"place {s}" for s in range(pattern.shape[-1])]
        rows = (f"attention of head {h} from place {t}", f"component {u} of the values of head {g}")
        return Arithmetic(r"z_{h,t,u} = \sum_s A_{h,t,s} v_{g,s,u}", pattern[h, t], v[g, :, u], labels, rows)

    def _out(self, branch: str) -> Arithmetic:
        t, d = self.index
        heads, module = self.site(f"{branch}.heads"), getattr(self.block, branch).o  # (H, T, U)
        labels = [f"head {h}, component {u}" for h in range(heads.shape[0]) for u in range(heads.shape[2])]
        added = {} if module.bias is None else {"bias": float(module.bias[d])}
        rows = (f"all heads at place {t}", f"row {d} of the output matrix")
        formula = r"y_{t,d} = \sum_{h,u} z_{h,t,u} W_{d,hU+u} + b_d"
        return Arithmetic(formula, heads[:, t].flatten(), module.weight[d], labels, rows, added=added)

    def _pre(self, branch: str, part: str) -> Arithmetic:
        module = getattr(self.block.feedforward, "gate", self.block.feedforward.up)
        return self._linear(r"a_{t,f} = \sum_d x_{t,d} W_{f,d} + b_f", self._reads(branch), module)

    def _post(self, branch: str, part: str) -> Arithmetic:
        t, f = self.index
        feed = self.block.feedforward
        active = feed.activation(self.site("feedforward.pre")[t, f])[None]
        name = str(getattr(self.config.feedforward, "activation", "activation"))
        if not hasattr(feed, "gate"):
            formula = r"h_{t,f} = \operatorname{act}(a_{t,f})"
            return Arithmetic(formula, active, active.new_ones(1), [f"{name} of the number before it"])
        up = feed.up(self._reads(branch)[t])[f][None]
        rows = (f"{name} of the gate", "the other projection")
        return Arithmetic(r"h_{t,f} = \operatorname{act}(a_{t,f}) \, u_{t,f}", active, up, ["gate times up"], rows)

    def _normed(self, branch: str) -> Arithmetic:
        name = "norm" if self.config.placement == "parallel" else f"norm_{branch}"
        x = self.site("resid_pre" if branch == "attention" else "resid_mid")
        if branch == "cross":
            x = self.site("resid_pre") + self.site("attention.out")
        return _norm_cell(getattr(self.block, name), x[self.index[0]], self.index[1])

    def _final(self) -> Arithmetic:
        if self.trunk.norm is None:
            raise StudioError("with placement='post' the last block's output is final: look at its resid_post.")
        last = f"{self.stack}block.{len(self.trunk.blocks) - 1}.resid_post"
        from glassformer.lens.trace import trace

        x = trace(self.model, self.reading.tokens, sites=[last], **self.reading.given)[last][0]
        return _norm_cell(self.trunk.norm, x[self.index[0]], self.index[1])

    def _stream(self, name: str) -> Arithmetic:
        """A sum of what was written; under pre-norm and parallel placement nothing else happens to the stream."""
        import torch

        t, d = self.index
        parts = {"resid_pre": ["resid_pre"], "resid_mid": ["resid_pre", "attention.out", "cross.out"]}
        names = parts.get(name, ["resid_pre", "attention.out", "cross.out", "feedforward.out"])
        known = [part for part in names if f"{self.stack}block.{self.layer}.{part}" in self.run]
        values = torch.stack([self.site(part)[t, d] for part in known])
        formula = r"x_{t,d} = \sum_{\text{parts}} y_{t,d}"
        return Arithmetic(formula, values, torch.ones_like(values), known, ("what was written", "1"))

    def _embed(self) -> Arithmetic:
        import torch

        t, d = self.index
        config, trunk = self.config, self.trunk
        if config.embedding.norm or config.embedding.n_segments:
            raise StudioError("this embedding is normed or has segments: its cells are no sum of two numbers.")
        ids = self.reading.ids if self.reading.target is None or self.stack == "encoder." else self.reading.target
        table = self.model.embed.tokens.weight
        blank = torch.zeros(1, len(ids), config.d_model, dtype=table.dtype)
        position = float(trunk.position.add(blank, torch.arange(len(ids))[None])[0, t, d])
        added = {"position": position} if position else {}
        scale = torch.tensor([config.embedding.scale], dtype=table.dtype)
        labels, rows = [f"token {ids[t]}"], (f"row {ids[t]} of the token table", "the embedding's scale")
        return Arithmetic(r"x_{t,d} = c E_{id_t,d} + p_{t,d}", table[ids[t], d][None], scale, labels, rows, added=added)

    def _logit(self) -> Arithmetic:
        t, v = self.index
        head = self.model.head
        x = self.run[f"{self.stack}final"][0][t]
        if head.transform is not None:
            x = head.norm(head.activation(head.transform(x)))
        weight = (self.model.embed.tokens.weight if head.weight is None else head.weight)[v]
        added = {} if head.bias is None else {"bias": float(head.bias[v])}
        labels = [f"component {i}" for i in range(len(x))]
        rows = (f"what the head reads at place {t}", f"row {v} of the output table")
        return Arithmetic(r"l_{t,v} = c \sum_d x_{t,d} W_{v,d}", x, weight, labels, rows, head.scale, added)


def _norm_cell(norm: Any, x: "Tensor", d: int) -> Arithmetic:
    """One component of a normed row."""
    x = x.double()
    centred = hasattr(norm, "bias")  # an RMSNorm has none
    mean = float(x.mean()) if centred else 0.0
    spread = x - mean
    sigma = float((spread.square().mean() + norm.eps).sqrt())
    bias = getattr(norm, "bias", None)
    added = {} if bias is None else {"bias": float(bias[d])}
    formula = r"\frac{x_d - \mu}{\sigma} w_d + b_d" if centred else r"\frac{x_d}{\sigma} w_d"
    rows = ("component less the mean" if centred else "component", "weight / sigma")
    note = f"mean {mean:.6g}, sigma {sigma:.6g}" if centred else f"sigma {sigma:.6g}"
    weight = norm.weight[d].double()[None] / sigma
    return Arithmetic(formula, spread[d][None], weight, [f"component {d}"], rows, added=added, note=note)
