"""The doctor's report: diagnoses with location, evidence and fix, the findings, and what was not examined."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from glassformer.doctor.subject.measure import many
from glassformer.finding import Finding, Verdict

TITLES: dict[str, str] = {
    "causal_leak": "causal mask leak: a position attends to later tokens",
    "mask_value": "weak mask constant: masked scores have a value that real scores can reach",
    "over_mask": "mask too strict: keys that should be visible are masked",
    "window": "sliding window size: the number of visible keys is not the declared one",
    "cache_mismatch": "KV cache mismatch: cached decoding differs from the full forward pass",
    "decode_position": "wrong decoding position: a cached token has another position than in the full sequence",
    "cache_mask": "wrong mask with a cache: several tokens fed at once see the wrong keys",
    "cache_rollback": "cache rollback: after crop() the cache still depends on the dropped tokens",
    "cache_reorder": "cache reorder: after reordering, part of the cache belongs to other sequences",
    "decode_select": "wrong token selection: generate() does not return the argmax of the logits",
    "state_leak": "state between calls: the output depends on earlier calls",
    "position_twice": "repeated positions: the position embedding is added more than once",
    "position_missing": "missing positions: the position embedding does not reach the computation",
    "position_train_infer": "train/inference mismatch: training and inference use different positions or context",
    "rope_relative": "rotary embedding: the rotation is not the declared one, or not relative",
    "rope_pairing": "rotary pairing: the rotation pairs the wrong components",
    "rope_values": "rotated values: RoPE is applied to v",
    "attn_scale": "attention scale: q·k is multiplied by another factor than declared",
    "softmax_axis": "softmax axis: softmax runs over the wrong dimension",
    "attention_weights": "changed attention weights: something is applied to them after softmax",
    "head_layout": "head layout: splitting or merging heads mixes tokens or heads",
    "pad_leak": "padding leak: real tokens depend on padding",
    "left_pad_position": "positions under left padding: padding tokens are counted",
    "batch_variance": "batch dependence: a sequence's output depends on the other sequences",
    "mask_nan": "NaN or infinite logits for real tokens",
    "norm_placement": "norm placement: norms or residual connections are not wired as declared",
    "norm_eps": "norm formula: eps or the variance is not the declared one",
    "norm_axis": "norm axis: a norm takes its statistics over other tokens",
    "activation": "activation function: not the declared one",
    "residual_growth": "residual growth: the residual stream grows too fast, or its projections start too large",
    "eval_stochastic": "dropout in the wrong mode: eval() is random, or train() is not",
    "weight_tying": "weight tying: head and embedding are not tied as declared",
    "label_shift": "label shift: the loss compares logits with the wrong tokens",
    "loss_padding": "loss mask: the loss counts the wrong targets, or divides by the wrong number",
    "init_loss": "initial loss: far from ln(vocabulary size)",
    "dead_gradient": "missing gradient: parameters get no gradient",
    "layer_reuse": "reused layer: the same weights run at two depths, and no sharing is declared",
    "low_precision": "low precision: softmax runs in a narrower dtype than the model",
    "constant_logits": "constant logits: the output does not depend on the tokens",
}
"""Headline of each diagnosis: its usual name and what happens."""


SHOWN = {"row": "batch element"}
"""Parts of a location that are shown under another name."""
MINIMUM = 8
"""Probes that must have been made before a report without a diagnosis reads "healthy". A plain callable gets 15."""


def explanation(finding: Finding) -> str:
    """The cause that a failure shows; else that its bound is exceeded, and the reason for that bound."""
    if cause := finding.evidence.get("cause"):
        return str(cause)
    # a comparison of two results: what it gives as its reason is that of the bound
    return f"more than the bound allows ({finding.why})" if "weights" in finding.evidence else finding.why


@dataclass(frozen=True)
class Diagnosis:
    """A cause. `id` is its name in the taxonomy, `location` where it sits, as far as it is known."""

    id: str
    title: str
    location: dict[str, Any]
    evidence: tuple[Finding, ...]
    remedy: str
    consequences: tuple[Finding, ...] = ()

    @property
    def layer(self) -> int | None:
        value = self.location.get("layer")
        return value if isinstance(value, int) else None

    def where(self) -> str:
        """`layer 1, head 2`, or nothing."""
        known = [(name, value) for name, value in self.location.items() if value is not None and value != []]
        return ", ".join(f"{SHOWN.get(name, name)} {value}" for name, value in known)

    def text(self) -> str:
        location = self.where()
        lines = [f"{self.id}: {self.title}" + (f" ({location})" if location else "")]
        for finding in self.evidence[:3]:
            numbers = f" [{finding.numbers()}]" if finding.numbers() else ""
            lines.append(f"  seen by {finding.id.split('/')[1]}: {explanation(finding)}{numbers}")
        lines.append(f"  remedy: {self.remedy}")
        if self.consequences:
            names = sorted({f.id for f in self.consequences})
            shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
            lines.append(f"  probably its consequences: {shown}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "title": self.title,
            "location": self.location,
            "remedy": self.remedy,
            "evidence": [f.to_dict() for f in self.evidence],
            "consequences": [f.id for f in self.consequences],
        }


@dataclass(frozen=True)
class Report:
    """An examination. `healthy` says that enough was examined and nothing failed; `notes` has what was not."""

    subject: str
    kind: str
    diagnoses: tuple[Diagnosis, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    pictures: dict[str, Any] = field(default_factory=dict)
    """Matrices for the pictures: `leak`, how far output i moved when input j changed."""
    device: str = "cpu"
    """Where it was examined."""
    titles: Mapping[str, str] = field(default_factory=lambda: TITLES)
    """The diagnoses that can be made, with their headlines."""
    minimum: int = MINIMUM
    """Probes that must have been made before a report without a diagnosis reads "healthy"."""

    @property
    def healthy(self) -> bool:
        return self.examined and not self.diagnoses

    @property
    def examined(self) -> bool:
        """Whether a bug was found, or at least `minimum` probes were made."""
        return bool(self.diagnoses) or self.counts["pass"] + self.counts["fail"] >= self.minimum

    @property
    def coverage(self) -> tuple[str, ...]:
        """The diagnoses that at least one probe looked for."""
        made = {f.id.split("/")[0] for f in self.findings if f.verdict is not Verdict.SKIP}
        return tuple(name for name in self.titles if name in made)

    @property
    def counts(self) -> dict[str, int]:
        return {str(v): sum(f.verdict is v for f in self.findings) for v in Verdict}

    def verdict(self) -> str:
        """One sentence."""
        counts = self.counts
        made, skipped = counts["pass"] + counts["fail"], counts["skip"]
        of = f"{len(self.coverage)} of {len(self.titles)} diagnoses looked for"
        if not self.examined:
            few = f"only {many(made, 'probe')} could be made and {skipped} could not"
            return f"{self.subject} ({self.kind}): not examined: {few}; a verdict needs {self.minimum} ({of})."
        if self.healthy:
            seen = f"healthy as far as {many(made, 'probe')} can see; {skipped} not made ({of})."
            return f"{self.subject} ({self.kind}): {seen}"
        first = self.diagnoses[0]
        more = f", and {len(self.diagnoses) - 1} more" if len(self.diagnoses) > 1 else ""
        location = f" ({first.where()})" if first.where() else ""
        return f"{self.subject} ({self.kind}): {first.id}, {first.title}{location}{more}."

    def text(self) -> str:
        parts = [self.verdict(), *(d.text() for d in self.diagnoses)]
        if self.notes:
            parts.append("Notes:\n" + "\n".join(f"  {note}" for note in self.notes))
        return "\n\n".join(parts)

    def _repr_html_(self) -> str:
        """Return the display in a notebook."""
        from glassformer.doctor.html import display  # imports this module, so it cannot be imported at the top

        return display(self)

    def to_dict(self) -> dict[str, Any]:
        return {
            "subject": self.subject,
            "kind": self.kind,
            "device": self.device,
            "healthy": self.healthy,
            "examined": self.examined,
            "coverage": list(self.coverage),
            "verdict": self.verdict(),
            "diagnoses": [d.to_dict() for d in self.diagnoses],
            "findings": [f.to_dict() for f in self.findings],
            "notes": list(self.notes),
            "seconds": round(self.seconds, 3),
            "pictures": self.pictures,
        }
