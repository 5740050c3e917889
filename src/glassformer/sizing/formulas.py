"""Parameter counts as formulas, in the letters of docs/shapes.md. `flops` has the formulas of operations."""

from typing import assert_never

from glassformer.config import Dense, EncoderConfig, FeedForward, Gated, ModelConfig, MoE, NoFeedForward, Seq2SeqConfig
from glassformer.sizing.flops import (
    Formula,
    Term,
    attention_terms,
    feedforward_kinds,
    formula,
    kind_letters,
    letters,
    norm_parameters,
    of_shared,
    with_subscript,
)
from glassformer.sizing.parameters import first_layers, stacks


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
            return terms + of_shared(shared) + [(int(part.shared_gate), "D")]
        case Dense() | Gated() as expert:
            return _expert_terms(expert)
        case _:
            assert_never(part)


def _feedforward(config: ModelConfig, values: dict[str, int], blocks: int) -> Formula:
    kinds = feedforward_kinds(config)
    if len(kinds) == 1:
        return formula(values, feedforward_terms(kinds[0][0]), blocks)
    terms: list[Term] = []
    for part, subscript, layers in kinds:
        values = values | kind_letters(part, subscript, layers)
        terms += with_subscript(feedforward_terms(part), subscript, "L")
    return formula(values, terms)


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
        vectors = config.head.transform_bias + (norm_parameters(config.norm) if config.head.transform else 0)
        terms = [(1, f"D {W}"), (vectors, W), *terms]
    return terms


def _norm_terms(config: ModelConfig) -> list[Term]:
    """Return the parameters of the norms: in blocks, after the embedding, and final."""
    total = 0
    for stack, n_layers in stacks(config).items():
        cross = stack == "decoder" and isinstance(config, Seq2SeqConfig)
        for layer in first_layers(config, n_layers):
            branches = 1 + cross + (not isinstance(config.layer_feedforward(layer), NoFeedForward))
            total += 1 if config.placement == "parallel" else branches * (1 + (config.placement == "sandwich"))
        total += (config.placement != "post") - (not config.first_norm)
    embedding, per_norm = len(stacks(config)) * config.embedding.norm, norm_parameters(config.norm)
    if config.position_width == config.d_model:
        return [((total + embedding) * per_norm, "D")]
    return [(total * per_norm, "D"), (embedding * per_norm, "width")]
