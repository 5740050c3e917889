"""The exact arithmetic of one element of a tensor: its terms, what is added, and the result.

Every number comes from the traced forward pass and from the model's parameters. The result is recomputed from the terms
shown and returned next to the value that the model computed.
"""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, assert_never

from glassformer.config.model import PARALLEL
from glassformer.studio import schema
from glassformer.studio.api.inputs import ModelInputs, read_inputs
from glassformer.studio.errors import StudioError
from glassformer.studio.mathml import mathml
from glassformer.studio.models import ModelStore

if TYPE_CHECKING:
    from torch import Tensor

MAX_TERMS = 2048
"""Terms that are listed; the sum of the others, which have the smallest products, is one number."""


@dataclass
class Arithmetic:
    """`value = scale * sum(a * b) + sum(added)`, unless `result` is given."""

    formula: str
    a: "Tensor"
    b: "Tensor"
    labels: list[str]
    rows: tuple[str, str] = ("", "")
    """Descriptions of a and b."""
    scale: float = 1.0
    added: dict[str, float] = field(default_factory=dict)
    result: float | None = None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        a, b = self.a.double(), self.b.double()
        product = a * b
        keep = product.abs().argsort(descending=True)[:MAX_TERMS].sort().values
        rest = float(product.sum() - product[keep].sum())
        terms = [
            {"a": float(a[i]), "b": float(b[i]), "product": float(product[i]), "label": self.labels[i]}
            for i in keep.tolist()
        ]
        computed = self.scale * float(product.sum()) + sum(self.added.values()) if self.result is None else self.result
        facts = {"terms": terms, "n_terms": len(product), "rest": rest, "scale": self.scale, "added": self.added}
        labels = {"a": self.rows[0], "b": self.rows[1], "formula": self.formula, "mathml": mathml(self.formula)}
        return {**facts, **labels, "computed": computed, "note": self.note}


def cell(models: ModelStore, request: schema.Cell) -> dict[str, Any]:
    """Return one element of the tensor at a site; `index` has all axes except the batch."""
    import torch

    from glassformer.lens.sites import missing_site, sites_of
    from glassformer.lens.trace import trace

    inputs = read_inputs(models, request)
    known = sites_of(inputs.model)
    if request.site not in known:
        raise missing_site(inputs.model.config, request.site)
    stack, layer, name = _split_site(request.site)
    if name == "logits" and inputs.target is not None:
        stack = "decoder."
    wanted = [request.site, f"{stack}final"]
    wanted += [site for site in known if layer is not None and site.startswith(f"{stack}blocks.{layer}.")]
    with torch.no_grad():
        run = trace(inputs.model, inputs.tokens, sites=wanted, **inputs.trace_arguments)
        value = run[request.site][0]
        if len(request.index) != value.dim() or any(i >= n for i, n in zip(request.index, value.shape, strict=True)):
            raise StudioError(f"index {request.index} is outside {request.site}, which is {tuple(value.shape)} here.")
        element = _Element(inputs, run, stack, layer, tuple(request.index))
        arithmetic = element.arithmetic(name).to_dict()
    letters = known[request.site].letters.removeprefix("B,")
    number = float(value[tuple(request.index)])
    facts = {"site": request.site, "index": request.index, "letters": letters, "shape": list(value.shape)}
    return {**facts, "value": number if math.isfinite(number) else None, **arithmetic}


def _split_site(site: str) -> tuple[str, int | None, str]:
    """Split a site into stack, layer and name: decoder.blocks.3.attention.q -> ("decoder.", 3, "attention.q")."""
    stack = next((p for p in ("encoder.", "decoder.") if site.startswith(p)), "")
    parts = site.removeprefix(stack).split(".")
    return (stack, int(parts[1]), ".".join(parts[2:])) if parts[0] == "blocks" else (stack, None, ".".join(parts))


class _Element:
    """One index of one site of one traced forward pass."""

    def __init__(self, inputs: ModelInputs, run: Any, stack: str, layer: int | None, index: tuple[int, ...]):
        from glassformer.lens.residual import stack_of

        self.inputs, self.run, self.stack, self.layer, self.index = inputs, run, stack, layer, index
        self.model, self.config = inputs.model, inputs.model.config
        self.trunk: Any = stack_of(inputs.model, stack)
        self.block: Any = None if layer is None else self.trunk.layers[layer]

    def site(self, name: str) -> "Tensor":
        """Return a traced tensor of this block (or of the stack), without the batch axis."""
        prefix = self.stack if self.layer is None else f"{self.stack}blocks.{self.layer}."
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
        raise StudioError(f"the arithmetic of {name} cannot be shown as a sum of products: choose another site.")

    def _linear(self, formula: str, x: "Tensor", module: Any, row: int | None = None) -> Arithmetic:
        """Return x[t] . W[row] + b[row]."""
        t, row = self.index[-2], self.index[-1] if row is None else row
        added = {} if module.bias is None else {"bias": float(module.bias[row])}
        labels = [f"component {i}" for i in range(x.shape[-1])]
        rows = (f"row {t} of the input", f"row {row} of the weight matrix")
        return Arithmetic(formula, x[t], module.weight[row], labels, rows, added=added)

    def _branch_input(self, branch: str) -> "Tensor":
        """Return the input of a branch: the output of its norm, or the residual stream itself."""
        match self.config.placement:
            case "parallel":
                return self.site("attention.normed")
            case "pre" | "sandwich" | "parallel_two":
                return self.site(f"{branch}.normed")
            case "post" | "after":
                if branch == "cross":
                    raise StudioError(
                        f"with placement={self.config.placement!r} the input of cross-attention is not a site: choose "
                        "another site."
                    )
                return self.site("resid_pre" if branch == "attention" else "resid_mid")
            case _:
                assert_never(self.config.placement)

    def _projected(self, branch: str, part: str) -> Arithmetic:
        """Return the arithmetic of a query or key: a projection, then a norm or a rotation if the model has one."""
        import torch

        attention = getattr(self.block, branch)
        self._require_linear_heads()
        head, t, i = self.index
        x = self._branch_input(branch)
        positions = torch.arange(x.shape[0])[None]
        scheme = None if branch == "cross" else self.trunk.scheme(self.layer)  # cross-attention has no positions
        qk_embedding = None if scheme is None else scheme.qk_embedding(positions, x.dtype)
        x = x if qk_embedding is None else x + qk_embedding[0]
        module, norm = getattr(attention, part), getattr(attention, f"{part}_norm")
        width = self.config.d_head
        rotation = None if scheme is None else scheme.rotation(positions, x.dtype, x.shape[0] - 1)
        whole = (x[t] @ module.weight[head * width : (head + 1) * width].T).double()
        if module.bias is not None:
            whole = whole + module.bias[head * width : (head + 1) * width]
        if rotation is not None and i < 2 * rotation.cos.shape[-1]:
            return self._rotated(part, whole if norm is None else norm(whole.to(x.dtype)).double(), rotation, t, i)
        if norm is not None:
            return _norm_cell(norm, whole.to(x.dtype), i)
        return self._linear(rf"{part}_{{h,t,i}} = \sum_d x_{{t,d}} W_{{hK+i,d}} + b", x, module, head * width + i)

    def _require_linear_heads(self) -> None:
        """Refuse heads that are not a projection of the input, followed by a norm of each head and a rotation."""
        attention = self.config.attention
        if attention.latent is not None:
            raise StudioError(
                "keys and values of latent attention are two projections with a norm between them: choose another site."
            )
        if attention.clip is not None or attention.qk_norm_over != "head" or attention.qk_norm_after_rotation:
            raise StudioError(
                "queries and keys of this model are clipped, or normalized over several heads or after the rotation, "
                "which is not a sum of products: choose another site."
            )

    def _rotated(self, part: str, z: "Tensor", rotation: Any, t: int, i: int) -> Arithmetic:
        """Return one component of a rotated pair: a cos - b sin, or a sin + b cos."""
        import torch

        half = rotation.cos.shape[-1]
        pair, second = (i % half, i >= half) if rotation.pairing == "halves" else (i // 2, i % 2 == 1)
        first, other = (pair, pair + half) if rotation.pairing == "halves" else (2 * pair, 2 * pair + 1)
        cos, sin = float(rotation.cos[0, 0, t, pair]), float(rotation.sin[0, 0, t, pair])
        factors = torch.tensor([sin, cos] if second else [cos, -sin], dtype=torch.float64)
        rule = r"a \sin\theta + b \cos\theta" if second else r"a \cos\theta - b \sin\theta"
        labels = [f"component {first} before the rotation", f"component {other} before the rotation"]
        rows = ("the pair before the rotation", f"cosine and sine of the angle of position {t}")
        return Arithmetic(rf"{part}_{{h,t,i}} = {rule}", torch.stack([z[first], z[other]]), factors, labels, rows)

    def _value(self, branch: str, part: str) -> Arithmetic:
        self._require_linear_heads()
        head, _, i = self.index
        module = getattr(self.block, branch).v
        row = head * self.config.d_value + i
        return self._linear(r"v_{g,s,i} = \sum_d x_{s,d} W_{gU+i,d} + b", self._branch_input(branch), module, row)

    def _score(self, branch: str, part: str) -> Arithmetic:
        import torch

        if self.config.attention.softcap is not None:
            raise StudioError("a score with a soft cap is not a sum of products: choose another site.")
        h, t, s = self.index
        q, k = self.site(f"{branch}.q"), self.site(f"{branch}.k")
        g = h // (q.shape[0] // k.shape[0])
        added: dict[str, float] = {}
        if branch == "attention":
            positions = torch.arange(k.shape[1])[None]
            for name, scheme in (("position bias", self.trunk.position), ("score bias", self.trunk.score_bias)):
                bias = None if scheme is None else scheme.bias(positions, positions, q.dtype)
                if bias is not None:
                    added[name] = float(bias[0, h, t, s])
        hidden = bool(self.site(f"{branch}.scores")[h, t, s].isinf())
        note = f"position {t} may not attend to position {s}: the score is minus infinity." if hidden else ""
        formula = r"s_{h,t,s} = c \sum_i q_{h,t,i} k_{g,s,i}" + (" + b_{h,t,s}" if added else "")
        rows = (f"query of head {h}, position {t}", f"key of head {g}, position {s}")
        labels = [f"component {i}" for i in range(q.shape[-1])]
        scale = getattr(self.block, branch).scale
        return Arithmetic(formula, q[h, t], k[g, s], labels, rows, scale, added, None, note)

    def _pattern(self, branch: str, part: str) -> Arithmetic:
        h, t, s = self.index
        scores = self.site(f"{branch}.scores")[h, t].double()
        sinks = getattr(self.block, branch).sinks
        largest = scores.max() if sinks is None else scores.max().maximum(sinks[h].double())
        weights = (scores - largest).exp()
        total = weights.sum() if sinks is None else weights.sum() + (sinks[h].double() - largest).exp()
        labels = [f"position {i}" for i in range(len(scores))]
        rows = ("exp(score - largest score)", "1 / sum of all of these" + ("" if sinks is None else " and of the sink"))
        formula = r"A_{h,t,s} = \frac{e^{s_{h,t,s}}}{\sum_r e^{s_{h,t,r}}"
        formula += "}" if sinks is None else " + e^{c_h}}"
        return Arithmetic(
            formula, weights, (1 / total).expand_as(weights), labels, rows, result=float(weights[s] / total)
        )

    def _head(self, branch: str, part: str) -> Arithmetic:
        h, t, u = self.index
        pattern, v = self.site(f"{branch}.pattern"), self.site(f"{branch}.v")
        g = h // (pattern.shape[0] // v.shape[0])
        labels = [f"position {s}" for s in range(pattern.shape[-1])]
        rows = (f"attention of head {h} from position {t}", f"component {u} of the values of head {g}")
        return Arithmetic(r"z_{h,t,u} = \sum_s A_{h,t,s} v_{g,s,u}", pattern[h, t], v[g, :, u], labels, rows)

    def _out(self, branch: str) -> Arithmetic:
        t, d = self.index
        heads, module = self.site(f"{branch}.heads"), getattr(self.block, branch).o  # (H, T, U)
        labels = [f"head {h}, component {u}" for h in range(heads.shape[0]) for u in range(heads.shape[2])]
        added = {} if module.bias is None else {"bias": float(module.bias[d])}
        rows = (f"all heads at position {t}", f"row {d} of the output matrix")
        formula = r"y_{t,d} = \sum_{h,u} z_{h,t,u} W_{d,hU+u} + b_d"
        return Arithmetic(formula, heads[:, t].flatten(), module.weight[d], labels, rows, added=added)

    def _pre(self, branch: str, part: str) -> Arithmetic:
        module = getattr(self.block.feedforward, "gate", self.block.feedforward.up)
        return self._linear(r"a_{t,f} = \sum_d x_{t,d} W_{f,d} + b_f", self._branch_input(branch), module)

    def _post(self, branch: str, part: str) -> Arithmetic:
        t, f = self.index
        feed = self.block.feedforward
        pre = self.site("feedforward.pre")[t, f][None]
        gated = hasattr(feed, "gate")
        active = feed.activation(feed.limited_gate(pre) if gated else pre)
        name = str(getattr(self.config.layer_feedforward(self.layer or 0), "activation", "activation"))
        if not gated:
            formula = r"h_{t,f} = \operatorname{act}(a_{t,f})"
            return Arithmetic(formula, active, active.new_ones(1), [f"{name} of the pre-activation"])
        up = feed.factor(feed.up(self._branch_input(branch)[t])[f][None])
        rows = (f"{name} of the gate", "the up projection")
        return Arithmetic(r"h_{t,f} = \operatorname{act}(a_{t,f}) \, u_{t,f}", active, up, ["gate times up"], rows)

    def _normed(self, branch: str) -> Arithmetic:
        name = "norm" if self.config.placement == "parallel" else f"norm_{branch}"
        parallel = self.config.placement in PARALLEL
        x = self.site("resid_pre" if branch != "feedforward" or parallel else "resid_mid")
        if branch == "cross" and not parallel:
            x = x + self.config.residual_scale * self.site(self._added("attention"))
        if branch == "attention" and self.layer is not None and not self.config.has_attention_norm(self.layer):
            raise StudioError("the first layer of this model has no norm before attention: choose resid_pre.")
        return _norm_cell(getattr(self.block, name), x[self.index[0]], self.index[1])

    def _final(self) -> Arithmetic:
        if self.trunk.norm is None:
            raise StudioError("with placement='post' there is no final norm: choose resid_post of the last block.")
        last = f"{self.stack}blocks.{len(self.trunk.layers) - 1}.resid_post"
        from glassformer.lens.trace import trace

        x = trace(self.model, self.inputs.tokens, sites=[last], **self.inputs.trace_arguments)[last][0]
        return _norm_cell(self.trunk.norm, x[self.index[0]], self.index[1])

    def _stream(self, name: str) -> Arithmetic:
        """Return the sum of branch outputs; with pre-norm or parallel placement the residual stream is nothing else."""
        import torch

        t, d = self.index
        branches = {"resid_pre": [], "resid_mid": ["attention", "cross"]}.get(
            name, ["attention", "cross", "feedforward"]
        )
        names = ["resid_pre", *(self._added(branch) for branch in branches)]
        known = [part for part in names if f"{self.stack}blocks.{self.layer}.{part}" in self.run]
        values = torch.stack([self.site(part)[t, d] for part in known])
        factors = torch.full_like(values, self.config.residual_scale)
        factors[0] = 1.0
        formula = r"x_{t,d} = \sum_{\text{parts}} c\, y_{t,d}"
        return Arithmetic(formula, values, factors, known, ("output of each branch", "its factor"))

    def _added(self, branch: str) -> str:
        """Return the site of what a branch adds to the residual stream, before the residual scale."""
        return f"{branch}.out_normed" if self.config.placement in ("after", "sandwich") else f"{branch}.out"

    def _embed(self) -> Arithmetic:
        import torch

        t, d = self.index
        config, trunk = self.config, self.trunk
        if config.embedding.norm or config.embedding.n_segments or config.embedding.width:
            raise StudioError(
                "an embedding with a norm, segments or a projection is not a sum of two numbers: choose another site."
            )
        ids = self.inputs.ids if self.inputs.target is None or self.stack == "encoder." else self.inputs.target
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
        if self.config.head.softcap is not None:
            raise StudioError("a logit with a soft cap is not a sum of products: choose the site final.")
        x = self.run[f"{self.stack}final"][0][t]
        if head.transform is not None:
            x = head.transform(x)
        if head.activation is not None:
            x = head.norm(head.activation(x))
        weight = (self.model.embed.tokens.weight if head.weight is None else head.weight)[v]
        added = {} if head.bias is None else {"bias": float(head.bias[v])}
        labels = [f"component {i}" for i in range(len(x))]
        rows = (f"input of the output head at position {t}", f"row {v} of the output table")
        return Arithmetic(r"l_{t,v} = c \sum_d x_{t,d} W_{v,d}", x, weight, labels, rows, head.scale, added)


def _norm_cell(norm: Any, x: "Tensor", d: int) -> Arithmetic:
    """Return the arithmetic of one component of a norm's output."""
    x = x.double()
    from glassformer.model.layers import LayerNorm

    centred = isinstance(norm, LayerNorm)
    mean = float(x.mean()) if centred else 0.0
    spread = x - mean
    sigma = float((spread.square().mean() + norm.eps).sqrt())
    bias = getattr(norm, "bias", None)
    added = {} if bias is None else {"bias": float(bias[d])}
    formula = r"\frac{x_d - \mu}{\sigma} w_d + b_d" if centred else r"\frac{x_d}{\sigma} w_d"
    rows = ("component minus the mean" if centred else "component", "weight / sigma")
    note = f"mean {mean:.6g}, sigma {sigma:.6g}" if centred else f"sigma {sigma:.6g}"
    weight = norm.factor()[d].double()[None] / sigma
    return Arithmetic(formula, spread[d][None], weight, [f"component {d}"], rows, added=added, note=note)
