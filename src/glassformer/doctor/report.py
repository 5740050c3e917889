"""What the doctor says: diagnoses with place, evidence and remedy, findings behind them, and what was not examined."""

from dataclasses import dataclass, field
from typing import Any

from glassformer.finding import Finding, Verdict

TITLES: dict[str, str] = {
    "causal_leak": "a place sees tokens after it",
    "mask_value": "masked scores are a number that real scores can reach",
    "over_mask": "keys that should be visible are masked",
    "window": "the window shows another number of keys than declared",
    "cache_mismatch": "decoding with the cache is not the full pass",
    "decode_position": "a cached token stands at another position than in the full sequence",
    "cache_mask": "several tokens with a cache see the wrong keys",
    "cache_rollback": "after a crop the cache remembers what was dropped",
    "cache_reorder": "after a reorder part of the cache belongs to other rows",
    "decode_select": "generate() does not pick the likeliest token",
    "state_leak": "an answer depends on earlier calls",
    "position_missing": "positions do not reach the computation",
    "position_train_infer": "training and inference see different positions or context",
    "rope_relative": "rotary positions are not those declared, or not relative",
    "rope_pairing": "the rotation pairs components the wrong way",
    "rope_values": "values are rotated",
    "attn_scale": "scores are scaled by another factor than declared",
    "softmax_axis": "softmax runs over the wrong axis",
    "head_layout": "splitting or joining heads mixes tokens or heads",
    "pad_leak": "padding is seen",
    "left_pad_position": "positions count padding",
    "batch_variance": "a row depends on its neighbours",
    "mask_nan": "masks make NaN",
    "norm_placement": "norms or residuals are wired otherwise than declared",
    "norm_eps": "a norm's formula or eps is not the declared one",
    "norm_axis": "a norm takes statistics over other tokens",
    "activation": "the activation is not the declared one",
    "residual_growth": "the residual stream grows too fast, or its weights start too large",
    "eval_stochastic": "dropout in the wrong mode",
    "weight_tying": "head and embedding are not tied as declared",
    "label_shift": "the loss compares logits with the wrong tokens",
    "loss_padding": "the loss counts the wrong targets",
    "init_loss": "the first loss is far from ln V",
    "dead_gradient": "parameters get no gradient",
}
"""One line per diagnosis."""


@dataclass(frozen=True)
class Diagnosis:
    """A cause. `id` is its name in the taxonomy, `place` where it sits, as far as that could be told."""

    id: str
    title: str
    place: dict[str, Any]
    evidence: tuple[Finding, ...]
    remedy: str
    consequences: tuple[Finding, ...] = ()

    @property
    def layer(self) -> int | None:
        value = self.place.get("layer")
        return value if isinstance(value, int) else None

    def where(self) -> str:
        """`layer 1, head 2`, or nothing."""
        words = [f"{name} {value}" for name, value in self.place.items() if value is not None and value != []]
        return ", ".join(words)

    def text(self) -> str:
        place = self.where()
        lines = [f"{self.id}: {self.title}" + (f" ({place})" if place else "")]
        for finding in self.evidence[:3]:
            numbers = f" [{finding.numbers()}]" if finding.numbers() else ""
            cause = finding.evidence.get("cause")
            lines.append(f"  seen by {finding.id.split('/')[1]}: {cause or finding.why}{numbers}")
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
            "place": self.place,
            "remedy": self.remedy,
            "evidence": [f.to_dict() for f in self.evidence],
            "consequences": [f.id for f in self.consequences],
        }


@dataclass(frozen=True)
class Report:
    """An examination. `healthy` says that nothing failed; what could not be examined is in `notes`."""

    subject: str
    kind: str
    diagnoses: tuple[Diagnosis, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    pictures: dict[str, Any] = field(default_factory=dict)
    """Matrices for the pictures: `leak`, how far output i moved when input j changed."""

    @property
    def healthy(self) -> bool:
        return not self.diagnoses

    @property
    def counts(self) -> dict[str, int]:
        return {str(v): sum(f.verdict is v for f in self.findings) for v in Verdict}

    def verdict(self) -> str:
        """One sentence."""
        counts = self.counts
        examined = counts["pass"] + counts["fail"]
        if self.healthy:
            skipped = counts["skip"]
            return f"{self.subject} ({self.kind}): healthy as far as {examined} probes can see; {skipped} not made."
        first = self.diagnoses[0]
        more = f", and {len(self.diagnoses) - 1} more" if len(self.diagnoses) > 1 else ""
        place = f" ({first.where()})" if first.where() else ""
        return f"{self.subject} ({self.kind}): {first.id}, {first.title}{place}{more}."

    def text(self) -> str:
        parts = [self.verdict(), *(d.text() for d in self.diagnoses)]
        if self.notes:
            parts.append("Notes:\n" + "\n".join(f"  {note}" for note in self.notes))
        return "\n\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        return {
            "subject": self.subject,
            "kind": self.kind,
            "healthy": self.healthy,
            "verdict": self.verdict(),
            "diagnoses": [d.to_dict() for d in self.diagnoses],
            "findings": [f.to_dict() for f in self.findings],
            "notes": list(self.notes),
            "seconds": round(self.seconds, 3),
            "pictures": self.pictures,
        }
