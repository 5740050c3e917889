"""Whole models counted to the last scalar: GPT-2 in its four sizes, BERT-Large in its nine readings."""

import math
from collections.abc import Iterator
from fractions import Fraction

from glassformer import config as c
from glassformer.config import presets
from glassformer.finding import Finding
from glassformer.lens.figure import COLOURS, GREY, Figure
from glassformer.model import build, n_parameters
from glassformer.sizing import count, count_by_part, parameters
from glassformer.theory.claims.claim import Lab, claim, figure

GPT2 = {"gpt2": 124_439_808, "gpt2_medium": 354_823_168, "gpt2_large": 774_030_080, "gpt2_xl": 1_557_611_200}
BERT_LARGE = {
    30_000: (333_557_760, 334_607_360, 335_691_058),
    30_522: (334_092_288, 335_141_888, 336_226_108),
    28_996: (332_529_664, 333_579_264, 334_661_958),
}
"""Vocabulary to scalars without pooler, with pooler, with pooler and both pre-training heads."""
NEXT_SENTENCE = 2 * 1024 + 2
"""BERT's classifier of sentence pairs, a linear map from the pooled vector; no part of our models."""


def block(d: int, f: int) -> int:
    return (4 * d * d + 4 * d) + (2 * d * f + d + f) + 4 * d


def gpt2_formula(vocab: int, d: int, layers: int, context: int) -> int:
    """V·d + T·d + L·block(d, 4d) + 2d, the head tied."""
    return vocab * d + context * d + layers * block(d, 4 * d) + 2 * d


def bert_formula(vocab: int, d: int, layers: int, context: int) -> tuple[int, int, int]:
    """Encoder; with pooler; with pooler, masked-LM head (tied, with output biases) and next-sentence classifier."""
    embeddings = vocab * d + context * d + 2 * d + 2 * d
    encoder = embeddings + layers * block(d, 4 * d)
    pooler = d * d + d
    heads = (d * d + d) + 2 * d + vocab + (2 * d + 2)
    return encoder, encoder + pooler, encoder + pooler + heads


def built(config: c.ModelConfig) -> int:
    """Scalars of the model the engine builds, shapes only."""
    return n_parameters(build(config, device="meta"))


@claim("gpt2-small-param-count")
def gpt2_small_param_count(lab: Lab) -> Iterator[Finding]:
    changes = {"head__tied": False} if lab.broken else {}
    for name, stated in GPT2.items():
        config = presets.ALL[name](**changes)
        closed = gpt2_formula(config.vocab_size, config.d_model, config.n_layers, config.max_len or 0)
        yield lab.exact(
            name,
            closed == built(config) == count(config) == stated,
            formula=closed,
            engine=built(config),
            sheet=count(config),
        )
    config = presets.gpt2(**changes)
    shapes, parts = parameters(config), count_by_part(config)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    layer = {name: n for name, n in sizes.items() if name.startswith("decoder.blocks.0.")}
    terms = {
        "token table": sizes["embed.tokens.weight"],
        "position table": sizes["decoder.position.weight"],
        "attention of a layer": sum(n for name, n in layer.items() if ".attention." in name),
        "MLP of a layer": sum(n for name, n in layer.items() if ".feedforward." in name),
        "LayerNorms of a layer": sum(n for name, n in layer.items() if ".norm_" in name),
        "layer": sum(layer.values()),
        "twelve layers": 12 * sum(layer.values()),
        "final LayerNorm": sum(n for name, n in sizes.items() if name.startswith("decoder.norm.")),
    }
    stated_terms = (38_597_376, 786_432, 2_362_368, 4_722_432, 3_072, 7_087_872, 85_054_464, 1_536)
    yield lab.exact(
        "every term", tuple(terms.values()) == stated_terms and parts["attention"] == 12 * 2_362_368, **terms
    )
    untied = built(presets.gpt2(head__tied=False))
    yield lab.exact("untied", untied == 163_037_184, engine=untied)
    total = built(config)
    shares = Fraction(terms["twelve layers"], total), Fraction(terms["token table"], total)
    yield lab.exact(
        "who holds most",
        round(shares[0], 4) == Fraction("0.6835")
        and round(shares[1], 4) == Fraction("0.3102")
        and round(Fraction(terms["token table"], terms["layer"]), 1) == Fraction("5.4")
        and max(sizes, key=lambda name: sizes[name]) == "embed.tokens.weight",
        layers=float(shares[0]),
        token_table=float(shares[1]),
    )


@figure("gpt2-small-param-count", "GPT-2 small: 124,439,808 parameters, area by count", height=4.0)
def draw_gpt2(lab: Lab, fig: Figure) -> None:
    """A treemap: areas are counts. Left the two tables, right twelve layers, each split into MLP and attention."""
    from matplotlib.patches import Rectangle

    total, table, positions, layers = 124_439_808, 38_597_376, 786_432, 85_054_464
    ax = fig.canvas.subplots()

    def box(x: float, y: float, width: float, height: float, colour: str, text: str, size: float = 8) -> None:
        ax.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor="white", linewidth=1, alpha=0.85))
        ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size, color="white")

    left = (table + positions) / (total - 1536)
    split = table / (table + positions)
    box(0, 0, left, split, COLOURS[0], f"token table\n50,257 × 768\n{table:,}\n{table / total:.1%}")
    box(0, split, left, 1 - split, COLOURS[3], "")
    ax.text(0, 1.012, f"position table {positions:,}", fontsize=8, color=COLOURS[3], va="bottom")
    width, height, share = (1 - left) / 4, 1 / 3, 4_722_432 / 7_087_872
    for layer in range(12):
        x, y = left + width * (layer % 4), 1 - height * (layer // 4 + 1)
        mlp = f"layer {layer}\nMLP\n4,722,432" if layer == 0 else f"{layer}: MLP"
        attention = "attention\n2,362,368" if layer == 0 else "attention"
        box(x, y + height * (1 - share), width, height * share, COLOURS[1], mlp, 7.5)
        box(x, y, width, height * (1 - share), COLOURS[2], attention, 7.5)
    ax.text(1, 1.012, f"twelve layers {layers:,} ({layers / total:.2%})", fontsize=8, ha="right", va="bottom")
    ax.set_xlim(0, 1)
    ax.set_ylim(0, 1)
    ax.axis("off")


@claim("bert-large-param-count")
def bert_large_param_count(lab: Lab) -> Iterator[Finding]:
    # the hypothesis that goes: learned positions, as the exercise assumes with its fixed sinusoids
    changes = {"position": c.Sinusoidal()} if lab.broken else {}
    for vocab, stated in BERT_LARGE.items():
        base = presets.bert_large(vocab_size=vocab, **changes)
        variants = (
            presets.bert_large(vocab_size=vocab, head=None, pooler=False, **changes),
            presets.bert_large(vocab_size=vocab, head=None, **changes),
            base,
        )
        engine = [built(variant) for variant in variants]
        sheet = [count(variant) for variant in variants]
        engine[2] += NEXT_SENTENCE
        sheet[2] += NEXT_SENTENCE
        yield lab.exact(
            f"V = {vocab:,}",
            bert_formula(vocab, 1024, 24, 512) == tuple(engine) == tuple(sheet) == stated,
            engine=engine,
        )
    sizes = {name: math.prod(shape) for name, shape in parameters(presets.bert_large(**changes)).items()}

    def part(*words: str) -> int:
        return sum(n for name, n in sizes.items() if all(word in name for word in words))

    terms = {
        "layer": part("encoder.blocks.0."),
        "attention": part("blocks.0.attention."),
        "MLP": part("blocks.0.feedforward."),
        "two LN": part("blocks.0.norm_"),
        "24 layers": part("encoder.blocks."),
        "positions": part("encoder.position"),
        "segments": part("embed.segments"),
        "embedding LN": part("encoder.embed_norm"),
        "pooler": part("pooler"),
        "MLM transform": part("head.transform"),
        "MLM LN": part("head.norm"),
        "next sentence": NEXT_SENTENCE,
    }
    # fmt: off
    stated_terms = (12_596_224, 4_198_400, 8_393_728, 4_096, 302_309_376, 524_288, 2_048, 2_048, 1_049_600, 1_049_600,
                    2_048, 2_050)
    # fmt: on
    yield lab.exact("every term", tuple(terms.values()) == stated_terms, **terms)
    rounds = {(v, i): round(n, -7) for v, row in BERT_LARGE.items() for i, n in enumerate(row)}
    yield lab.exact(
        "340M to two digits",
        [key for key, value in rounds.items() if value == 340_000_000] == [(30_000, 2), (30_522, 1), (30_522, 2)],
        rounded={f"V={v}, reading {i}": n for (v, i), n in rounds.items()},
    )


@figure("bert-large-param-count", "BERT-Large, summed part by part", height=3.2)
def draw_bert(lab: Lab, fig: Figure) -> None:
    d = 1024
    rows = [("exercise, V = 30,000", 30_000), ("uncased, V = 30,522", 30_522), ("cased, V = 28,996", 28_996)]
    whole, detail = fig.canvas.subplots(1, 2, width_ratios=(3, 2))
    for y, (_, vocab) in enumerate(rows):
        parts = {
            "token table": vocab * d,
            "positions, segments, norm": 512 * d + 4 * d,
            "24 layers": 24 * block(d, 4 * d),
            "pooler": d * d + d,
            "pre-training heads": d * d + 3 * d + vocab + NEXT_SENTENCE,
        }
        for ax in (whole, detail):
            left = 0.0
            for colour, (name, size) in zip(COLOURS, parts.items(), strict=False):
                ax.barh(y, size / 1e6, 0.55, left=left, color=colour, label=name if y == 0 else None)
                left += size / 1e6
        detail.text(left + 0.6, y, f"{left:.1f}M", va="center", fontsize=8)
    whole.set_yticks(range(len(rows)), [name for name, _ in rows])
    detail.set_yticks([])
    for ax in (whole, detail):
        ax.axvline(340, color=GREY, linestyle="--", linewidth=1)
        ax.axvline(335, color=GREY, linestyle=":", linewidth=1)
        ax.invert_yaxis()
        ax.set_xlabel("million parameters")
    whole.set_xlim(0, 350)
    detail.set_xlim(329, 341)
    detail.set_xticks([330, 335, 340])
    detail.set_title("from 335 on it rounds to 340", fontsize=8)
    fig.canvas.legend(*whole.get_legend_handles_labels(), loc="outside lower center", ncols=3)
