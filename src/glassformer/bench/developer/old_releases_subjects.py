"""Runs inside the environment of one release: tiny random decoders, a plain probe, and the doctor.

    python -m glassformer.bench.developer.old_releases_subjects            # list this release's subjects
    python -m glassformer.bench.developer.old_releases_subjects Doge/sdpa  # examine it; one JSON object per line

A subject is CLASS/ATTENTION. The probe is independent of the doctor, so that the two can disagree.
"""

import json
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from glassformer.bench.commands import parser

if TYPE_CHECKING:
    import torch
    from torch import nn

    from glassformer.doctor import Report

VOCAB, LENGTH, WARM = 97, 24, 6.0
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
COMMON = {"vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, **IDS}
GPT = {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128, **IDS}
NEOX = {**COMMON, "intermediate_size": 80, "max_position_embeddings": 128}
LLAMA = {**NEOX, "num_key_value_heads": 2}
BERT = {**COMMON, "intermediate_size": 80, "max_position_embeddings": 130, "type_vocab_size": 2, "is_decoder": True}

CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "Doge": ("doge", LLAMA),
    "RoFormer": ("roformer", {**BERT, "embedding_size": 48}),
    "BigBird": ("big_bird", {**BERT, "attention_type": "original_full"}),
    "RemBERT": ("rembert", {**BERT, "input_embedding_size": 32, "output_embedding_size": 40}),
    "MegatronBERT": ("megatron-bert", BERT),
    "BERT": ("bert", BERT),
    "RoBERTa": ("roberta", BERT),
    "Electra": ("electra", {**BERT, "embedding_size": 24}),
    "GPT2": ("gpt2", GPT),
    "GPTNeo": (
        "gpt_neo",
        {**COMMON, "num_heads": 4, "num_layers": 2, "max_position_embeddings": 128, "window_size": 8}
        | {"attention_types": [[["global", "local"], 1]]},
    ),
    "GPTNeoX": ("gpt_neox", NEOX),
    "GPTJ": ("gptj", {**GPT, "rotary_dim": 6}),
    "Llama": ("llama", LLAMA),
    "Mistral": ("mistral", {**LLAMA, "head_dim": 12, "sliding_window": 8}),
    "Mixtral": ("mixtral", {**LLAMA, "head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen2": ("qwen2", LLAMA),
    "Gemma2": ("gemma2", {**LLAMA, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}),
    "OPT": ("opt", {**COMMON, "ffn_dim": 80, "max_position_embeddings": 128, "word_embed_proj_dim": 48}),
    "BLOOM": ("bloom", {"vocab_size": VOCAB, "hidden_size": 48, "n_layer": 2, "n_head": 4, **IDS}),
    "Falcon": ("falcon", {**COMMON, "alibi": False, "max_position_embeddings": 128}),
}
"""Name -> model type of `transformers`, and a config that builds in milliseconds. All have causal heads."""


def attentions(name: str) -> list[str]:
    """Return the attention implementations of a class: eager always, sdpa if the class supports it."""
    import transformers

    model_type, _ = CLASSES[name]
    config = transformers.CONFIG_MAPPING[model_type]
    cls: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[config]
    return ["eager", *(["sdpa"] if cls._supports_sdpa else [])]


def build(name: str, attention: str) -> "nn.Module":
    """Build the class, tiny and random, with this attention implementation."""
    import torch
    import transformers

    model_type, sizes = CLASSES[name]
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[model_type](**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    got = model.config._attn_implementation
    if got != attention:
        raise ValueError(f"{name} was built with attn_implementation={attention!r} and uses {got!r}.")
    return model


@dataclass(frozen=True)
class Leak:
    """The largest change of an output when one later input was replaced, and the root mean square of the logits."""

    gap: float
    source: int
    target: int
    size: float

    @property
    def real(self) -> bool:
        """True if it exceeds rounding. Correct models agree to the bit, except experts, which regroup their tokens."""
        return self.gap > 4e-6 * self.size

    def text(self) -> str:
        return f"input {self.source} moves output {self.target} by {self.gap:.2g}" if self.gap else "nothing moves"


def largest_leak(matrix: "torch.Tensor", size: float) -> Leak:
    """Return the largest entry above the diagonal of a leak matrix: [i, j] is the change of output i with input j."""
    import torch

    future = torch.triu(matrix, diagonal=1)
    target, source = divmod(int(future.argmax()), matrix.shape[1])
    return Leak(float(future[target, source]), source, target, size)


def probe(model: Any, warm: float = WARM) -> Leak:
    """Replace one token at a time and compare all earlier outputs.

    Matrices are multiplied by `warm`, because fresh attention is almost uniform. It uses nothing of the doctor.
    """
    import copy

    import torch

    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(warm)
        tokens = torch.randint(3, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(1))
        base = model(input_ids=tokens).logits
        columns = []
        for position in range(LENGTH):
            changed = tokens.clone()
            changed[0, position] = 3 + (tokens[0, position] - 2) % (VOCAB - 3)
            columns.append((model(input_ids=changed).logits - base).abs().amax(dim=(0, 2)))
    return largest_leak(torch.stack(columns, dim=1), float(base.square().mean().sqrt()))


def summary(report: "Report") -> dict[str, Any]:
    """Return what the table shows of a report: diagnoses, location, leak, and what causality probes measured."""
    import torch

    matrix = report.pictures.get("leak")
    moved = None if matrix is None else largest_leak(torch.tensor(matrix), 1.0)
    explained = [f for f in report.findings if f.evidence.get("explained")]
    causal = [f for f in report.findings if f.id.startswith("causal_leak/") and f not in explained]
    return {
        "kind": report.kind,
        "diagnoses": [d.id for d in report.diagnoses],
        "where": report.diagnoses[0].where() if report.diagnoses else "",
        "seen_by": [f.id for f in report.diagnoses[0].evidence] if report.diagnoses else [],
        "says": report.diagnoses[0].text() if report.diagnoses else "",
        "leak": None if moved is None else moved.text(),
        "causality": {f.id.split("/")[1]: [f.measured, f.bound] for f in causal},
        "notes": sorted({f.id for f in explained}),
        "probes": report.counts,
    }


def examine(subject: str, seconds: float) -> dict[str, Any]:
    """Return one line of the table. A failure is described in `error`."""
    import glassformer as gf
    from glassformer.doctor import CannotExamineError

    began = time.monotonic()
    name, _, attention = subject.partition("/")
    found: dict[str, Any] = {"subject": subject, "diagnoses": [], "error": None}
    try:
        model = build(name, attention)
        leak = probe(model)
        found["probe"] = {"leaks": leak.real, "text": leak.text(), "gap": leak.gap, "size": leak.size}
        found |= summary(gf.diagnose(model, seconds=seconds, name=subject))
    except CannotExamineError as error:
        found["error"] = str(error)
    except Exception as error:  # a class that this release cannot build or run is reported in its line
        found["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return found | {"seconds": round(time.monotonic() - began, 1)}


def main() -> int:
    options = parser(__doc__)
    options.add_argument("subjects", nargs="*", metavar="CLASS/ATTENTION")
    options.add_argument("--seconds", type=float, default=300.0, help="Time limit of one examination. Default: 300.")
    given = options.parse_args()
    if not given.subjects:
        print("\n".join(f"{name}/{attention}" for name in CLASSES for attention in attentions(name)))
    for subject in given.subjects:
        print(json.dumps(examine(subject, given.seconds)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
