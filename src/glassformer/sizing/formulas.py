"""Parameter and FLOP counts as formulas in the letters of docs/shapes.md, with and without numbers substituted.

A formula is a sum of terms. A term is a coefficient and letters: (4, "D D") means 4·D². Widths are simplified where the
model allows: H·K is written D if they are equal, G is written H without grouped heads, and U is written K if values are
as wide as keys.
"""

from collections import Counter
from dataclasses import dataclass
from typing import assert_never

from glassformer.config import (
    Dense,
    EncoderConfig,
    FeedForward,
    Gated,
    Latent,
    LayerNorm,
    ModelConfig,
    MoE,
    NoFeedForward,
    RMSNorm,
    Seq2SeqConfig,
)
from glassformer.sizing.parameters import first_layers, stacks

Term = tuple[int, str]

_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Formula:
    """A formula: `letters` = `numbers` = `value`, counted `times` times (once per block)."""

    letters: str
    numbers: str
    value: int
    times: int = 1

    @property
    def total(self) -> int:
        return self.value * self.times

    def __str__(self) -> str:
        if not self.letters:
            return ""
        text = f"{self.letters} = {self.numbers}"
        return text if self.times == 1 else f"{text} = {self.value:,} × {self.times} blocks"


def formula(values: dict[str, int], terms: list[Term], times: int = 1) -> Formula:
    """Return the formula of a sum of terms. Like terms are combined; terms with coefficient 0 are left out."""
    merged: dict[str, int] = {}
    for coefficient, names in terms:
        if coefficient:
            merged[names] = merged.get(names, 0) + coefficient
    total, letters, numbers = 0, [], []
    for names, coefficient in merged.items():
        powers = Counter(names.split())
        value = coefficient
        for name, power in powers.items():
            value *= values[name] ** power
        total += value
        head = [] if coefficient == 1 and powers else [f"{coefficient:,}"]
        letters.append("·".join(head + [name + _superscript(power) for name, power in powers.items()]))
        numbers.append("·".join(head + [f"{values[name]:,}{_superscript(power)}" for name, power in powers.items()]))
    return Formula(" + ".join(letters), " + ".join(numbers), total, times)


def _superscript(power: int) -> str:
    return "" if power == 1 else str(power).translate(_SUPERSCRIPTS)


def letters(config: ModelConfig, batch: int = 1, context: int = 1, source: int = 0) -> dict[str, int]:
    """Return the value of every letter. N is B·T tokens.

    With latent attention C and Q are the widths of the low-rank vectors, R and O those of the shared and of the own
    components of a key. Fₛ is the width of a shared expert. In an encoder-decoder the encoder has Lₑ layers and
    Nₑ = B·S tokens.
    """
    ff = config.feedforward
    values = {
        "B": batch,
        "T": context,
        "S": source,
        "N": batch * context,
        "Nₑ": batch * source,
        "D": config.d_model,
        "H": config.n_heads,
        "G": config.n_kv_heads,
        "K": config.d_head,
        "U": config.d_value,
        "F": config.d_ff,
        "L": config.n_layers,
        "V": config.vocab_size,
    }
    if isinstance(ff, MoE):
        values |= {"E": ff.n_experts, "A": ff.n_active}
        if ff.shared is not None:
            values["Fₛ"] = ff.shared.d_ff
    if (latent := config.attention.latent) is not None:
        values |= {"C": latent.kv_rank, "R": latent.d_shared, "Q": latent.q_rank or config.d_model}
        values["O"] = config.d_head - latent.d_shared
    if isinstance(config, Seq2SeqConfig):
        values["Lₑ"] = config.n_encoder_layers
    return values


def widths(config: ModelConfig) -> tuple[str, str, str, str]:
    """Return the output widths of q, k and v and the input width of o, as letters."""
    H, G, K, U = config.n_heads, config.n_kv_heads, config.d_head, config.d_value
    q = "D" if config.d_model == H * K else "H K"
    k = q if G == H else "G K"
    return q, k, k if U == K else ("H U" if G == H else "G U"), q if U == K else "H U"


def parameter_formulas(config: ModelConfig) -> dict[str, Formula]:
    """Return the formula of each part (as in `count_by_part`). A formula of one block states the number of blocks."""
    values = letters(config) | {"width": config.embedding_width, "output": config.head_width}
    blocks = sum(len(first_layers(config, n)) for n in stacks(config).values())
    parts = {
        "embedding": formula(values | {"segments": config.embedding.n_segments}, _embedding(config)),
        "positions": _positions(config, values),
        "attention": formula(values, attention_terms(config, bias=True), blocks),
        "feedforward": _feedforward(config, values, blocks),
        "norms": formula(values, _norm_terms(config)),
        "head": formula(values, _head(config)),
    }
    if isinstance(config, Seq2SeqConfig):
        parts["cross"] = formula(values, attention_terms(config, bias=True), config.n_layers)
    if isinstance(config, EncoderConfig) and config.pooler:
        parts["pooler"] = formula(values, [(1, "D D"), (1, "D")])
    return parts


def attention_terms(config: ModelConfig, bias: bool) -> list[Term]:
    """Return the terms of q, k, v and o of one block: the weights, and with `bias` also biases and norms of q and k."""
    if (latent := config.attention.latent) is not None:
        return _latent_terms(config, latent, bias)
    q, k, v, o = widths(config)
    terms = [(1, f"D {width}") for width in (q, k, v, o)]
    if bias:
        terms += [(int(config.attention.bias), width) for width in (q, k, v)] + [(int(config.out_bias), "D")]
        if (norm := config.attention.qk_norm) is not None:
            widths_ = ("K", "K") if config.attention.qk_norm_over == "head" else ("H K", "G K")
            terms += [(_per_norm(norm), width) for width in widths_]
        terms.append((int(config.attention.sinks), "H"))
    return terms


def _latent_terms(config: ModelConfig, latent: Latent, bias: bool) -> list[Term]:
    low = latent.q_rank is not None
    terms = [(int(low), "D Q"), (1, "Q H K" if low else "D H K"), (1, "D C"), (1, "D R"), (1, "C H O"), (1, "C H U")]
    terms.append((1, "D H U"))
    if bias:
        down, per_norm = int(config.attention.bias), _per_norm(latent.norm)
        terms += [(low * (down + per_norm), "Q"), (down + per_norm, "C"), (down, "R")]
        terms += [(int(config.out_bias), "D"), (int(config.attention.sinks), "H")]
    return terms


def feedforward_terms(part: FeedForward) -> list[Term]:
    """Return the parameters of the feed-forward layer of one block, including all experts."""
    match part:
        case NoFeedForward():
            return []
        case MoE(expert=expert):
            terms = [
                (1, "E D"),
                (int(part.router.bias), "E"),
                *((n, f"E {names}") for n, names in _expert_terms(expert)),
            ]
            shared = [] if part.shared is None else _expert_terms(part.shared)
            return terms + _of_shared(shared) + [(int(part.shared_gate), "D")]
        case Dense() | Gated() as expert:
            return _expert_terms(expert)
        case _:
            assert_never(part)


_SUBSCRIPTS = "₁₂₃₄₅₆₇₈₉"


def feedforward_kinds(config: ModelConfig) -> list[tuple[FeedForward, str, int]]:
    """Return the different feed-forwards of the layers, with the subscript of their letters and the number of layers.

    The subscript is empty if all layers have the same feed-forward.
    """
    counts = Counter(config.layer_feedforward(layer) for n in stacks(config).values() for layer in range(n))
    return [(part, _SUBSCRIPTS[i] if len(counts) > 1 else "", n) for i, (part, n) in enumerate(counts.items())]


def kind_letters(part: FeedForward, subscript: str, layers: int) -> dict[str, int]:
    """Return the values of F, E and A of one kind of layers, and of L if there are several kinds."""
    expert = part.expert if isinstance(part, MoE) else part
    values = {"F": 0 if isinstance(expert, NoFeedForward) else expert.d_ff, "L": layers}
    if isinstance(part, MoE):
        values |= {"E": part.n_experts, "A": part.n_active, "Fₛ": 0 if part.shared is None else part.shared.d_ff}
    return {name + subscript: value for name, value in values.items()}


def with_subscript(terms: list[Term], subscript: str, prefix: str = "") -> list[Term]:
    """Return terms with a subscript at the letters that differ between kinds of layers."""
    marked = {name: name + subscript for name in ("F", "E", "A", "L", "Fₛ")}
    return [(n, " ".join(marked.get(letter, letter) for letter in f"{prefix} {names}".split())) for n, names in terms]


def _feedforward(config: ModelConfig, values: dict[str, int], blocks: int) -> Formula:
    kinds = feedforward_kinds(config)
    if len(kinds) == 1:
        return formula(values, feedforward_terms(kinds[0][0]), blocks)
    terms: list[Term] = []
    for part, subscript, layers in kinds:
        values = values | kind_letters(part, subscript, layers)
        terms += with_subscript(feedforward_terms(part), subscript, "L")
    return formula(values, terms)


def _of_shared(terms: list[Term]) -> list[Term]:
    """Return terms with the width of the shared expert in place of that of the others."""
    return [(n, " ".join("Fₛ" if name == "F" else name for name in names.split())) for n, names in terms]


def _expert_terms(expert: Dense | Gated) -> list[Term]:
    n_in = 2 if isinstance(expert, Gated) else 1
    return [(n_in + 1, "D F"), (n_in * expert.bias, "F"), (int(expert.has_down_bias), "D")]


def _embedding(config: ModelConfig) -> list[Term]:
    factorized, per_stack = config.embedding.width is not None, len(stacks(config))
    width = "width" if factorized else "D"
    return [
        (1, f"V {width}"),
        (int(config.embedding.n_segments > 0), f"segments {width}"),
        (per_stack * factorized, "D width"),
        (per_stack * (factorized and config.embedding.project_bias), "D"),
    ]


def _positions(config: ModelConfig, values: dict[str, int]) -> Formula:
    schemes = [config.position, *([] if config.score_bias is None else [config.score_bias])]
    tables = [table for scheme in schemes if (table := scheme.table(config))]
    terms = [(len(stacks(config)), " ".join(table)) for table in tables]
    return formula(values | {name: value for table in tables for name, value in table.items()}, terms)


def _head(config: ModelConfig) -> list[Term]:
    if config.head is None:
        return []
    W = "D" if config.head.width is None else "output"
    terms = [(int(not config.head.tied), f"V {W}"), (int(config.head.bias), "V")]
    if config.head.has_transform:
        vectors = config.head.transform_bias + (_per_norm(config.norm) if config.head.transform else 0)
        terms = [(1, f"D {W}"), (vectors, W), *terms]
    return terms


def _per_norm(norm: LayerNorm | RMSNorm) -> int:
    if not norm.weight:
        return 0
    return 2 if isinstance(norm, LayerNorm) and norm.bias else 1


def _norm_terms(config: ModelConfig) -> list[Term]:
    """Return the parameters of the norms: in blocks, after the embedding, and final."""
    total = 0
    for stack, n_layers in stacks(config).items():
        cross = stack == "decoder" and isinstance(config, Seq2SeqConfig)
        for layer in first_layers(config, n_layers):
            branches = 1 + cross + (not isinstance(config.layer_feedforward(layer), NoFeedForward))
            total += 1 if config.placement == "parallel" else branches * (1 + (config.placement == "sandwich"))
        total += (config.placement != "post") - (not config.first_norm)
    embedding, per_norm = len(stacks(config)) * config.embedding.norm, _per_norm(config.norm)
    if config.position_width == config.d_model:
        return [((total + embedding) * per_norm, "D")]
    return [(total * per_norm, "D"), (embedding * per_norm, "width")]


def flop_formulas(config: ModelConfig, batch: int, context: int, source: int) -> dict[str, Formula]:
    """Return the formula of each part of a forward pass with all T·S scores computed. `flops` has its numbers here."""
    values = letters(config, batch, context, source)
    values |= {"width": config.embedding_width, "output": config.head_width}
    both = isinstance(config, Seq2SeqConfig)
    blocks = ["Nₑ Lₑ", "N L"] if both else ["N L"]
    squares = ["S S Lₑ", "T T L"] if both else ["T T L"]
    U = "K" if config.d_value == config.d_head else "U"
    parts = {
        "projections": [(2 * n, f"{b} {w}") for b in blocks for n, w in attention_terms(config, bias=False)],
        "scores": [(2, f"B H K {s}") for s in squares],
        "mix": [(2, f"B H {U} {s}") for s in squares],
        "feedforward": _feedforward_flops(config, blocks),
        "head": [(2 * n, f"N {w}") for n, w in _head_matmuls(config)],
    }
    if config.embedding.width is not None:
        parts["embedding"] = [(2, f"{tokens} D width") for tokens in (["Nₑ", "N"] if both else ["N"])]
    if both:
        q, k, v, o = widths(config)
        parts["cross_projections"] = [(2, f"N L D {w}") for w in (q, o)] + [(2, f"Nₑ L D {w}") for w in (k, v)]
        parts["cross_scores"] = [(2, "B L T S H K"), (2, f"B L T S H {U}")]
    kinds = feedforward_kinds(config)
    for part, subscript, layers in kinds if len(kinds) > 1 else []:
        values |= kind_letters(part, subscript, layers)
    return {name: formula(values, terms) for name, terms in parts.items()}


def _feedforward_flops(config: ModelConfig, blocks: list[str]) -> list[Term]:
    kinds = feedforward_kinds(config)
    terms = [term for part, subscript, _ in kinds for term in with_subscript(_matmuls(part), subscript)]
    if len(kinds) == 1:
        return [(2 * n, f"{b} {w}") for b in blocks for n, w in terms]
    return [(2 * n, w) for part, sub, _ in kinds for n, w in with_subscript(_matmuls(part), sub, "N L")]


def _matmuls(part: FeedForward) -> list[Term]:
    """Return the weights of the matmuls that one token uses in one block."""
    if isinstance(part, NoFeedForward):
        return []
    if not isinstance(part, MoE):
        return [(3 if isinstance(part, Gated) else 2, "D F")]
    shared = [] if part.shared is None else _of_shared(_matmuls(part.shared))
    return [
        *((n, f"A {names}") for n, names in _matmuls(part.expert)),
        (1, "E D"),
        *shared,
        (int(part.shared_gate), "D"),
    ]


def _head_matmuls(config: ModelConfig) -> list[Term]:
    if config.head is None:
        return []
    W = "D" if config.head.width is None else "output"
    return [(1, f"{W} V"), (int(config.head.has_transform), f"D {W}")]
