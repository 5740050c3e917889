"""Every encoder-decoder family: the logits of transformers, the way back, and the same generated tokens.

transformers counts source positions by index, padding included; M2M-100 counts real tokens, as we do. `encode` is given
the indices where the two differ, in a batch that is padded on the left.
"""

import json

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import glassformer as gf
from glassformer import config as c
from glassformer.model import build
from glassformer.weights import WeightsError, load, load_config, save
from glassformer.weights.seq2seq import SEQ2SEQ
from tests.weights.tiny import BOUND, T, batch, edit, gap, precision, random_model, round_trip, saved

# D is a perfect square: transformers rounds sqrt(D) to float32
SIZES = {
    **{"vocab_size": 97, "d_model": 36, "encoder_layers": 2, "decoder_layers": 3, "max_position_embeddings": 23},
    **{"encoder_attention_heads": 6, "decoder_attention_heads": 6, "encoder_ffn_dim": 53, "decoder_ffn_dim": 53},
}
MT5 = {"d_model": 36, "d_kv": 7, "d_ff": 53, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 5, "vocab_size": 97}

CASES = {
    "bart": lambda: (hf.BartForConditionalGeneration, hf.BartConfig(**SIZES)),
    "bart, scaled": lambda: (
        hf.BartForConditionalGeneration,
        hf.BartConfig(**SIZES, scale_embedding=True, activation_function="relu"),
    ),
    "mbart": lambda: (hf.MBartForConditionalGeneration, hf.MBartConfig(**SIZES, scale_embedding=True)),
    "plbart": lambda: (hf.PLBartForConditionalGeneration, hf.PLBartConfig(**SIZES)),
    "blenderbot": lambda: (hf.BlenderbotForConditionalGeneration, hf.BlenderbotConfig(**SIZES)),
    "pegasus": lambda: (
        hf.PegasusForConditionalGeneration,
        hf.PegasusConfig(**SIZES, scale_embedding=True, activation_function="relu"),
    ),
    "marian": lambda: (
        hf.MarianMTModel,
        hf.MarianConfig(
            **SIZES,
            **{"scale_embedding": True, "activation_function": "swish", "pad_token_id": 1, "eos_token_id": 2},
            **{"forced_eos_token_id": 2, "decoder_start_token_id": 1},
        ),
    ),
    "m2m_100": lambda: (hf.M2M100ForConditionalGeneration, hf.M2M100Config(**SIZES)),
    "mt5": lambda: (hf.MT5ForConditionalGeneration, hf.MT5Config(**MT5, relative_attention_num_buckets=8)),
}
BY_TOKENS = {"m2m_100", "mt5"}
"""Model types whose source positions do not change with padding."""


def reference(case, dtype=torch.float32):
    model = random_model(*CASES[case](), dtype)
    with torch.no_grad():
        if hasattr(model, "final_logits_bias"):  # a buffer, zero unless it was trained
            noise = torch.randn(model.final_logits_bias.shape, generator=torch.Generator().manual_seed(3))
            model.final_logits_bias = noise.to(dtype)
        if model.config.model_type == "marian":  # sinusoids that transformers holds as parameters and does not save
            for stack in (model.model.encoder, model.model.decoder):
                stack.embed_positions.weight.copy_(sinusoids(*stack.embed_positions.weight.shape))
    if case == "bart, scaled":
        model.generation_config.forced_bos_token_id = 0  # as in published summary models
    return model


def sinusoids(rows, width):
    """In float64: transformers computes them in float32."""
    angles = torch.arange(rows)[:, None] / 10000 ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


@torch.no_grad()
def difference(model, ours, side, dtype=torch.float32):
    """The largest difference of the logits, relative to the largest logit."""
    source, source_mask, _ = batch(side)
    target, mask, _ = batch("right", seed=2, length=7)
    with precision(dtype):
        theirs = model(
            input_ids=source,
            attention_mask=source_mask.long(),
            decoder_input_ids=target,
            decoder_attention_mask=mask.long(),
        ).logits
    by_index = model.config.model_type not in BY_TOKENS and side == "left"
    memory = ours.encode(source, source_mask, torch.arange(T)[None] if by_index else None)
    logits = ours.decode(target, memory, source_mask, mask)
    assert logits.dtype == dtype
    return gap(logits, theirs, mask) / max(1.0, float(theirs.abs().max()))


@torch.no_grad()
def run(model):
    tokens = batch("none")[0]
    return model(input_ids=tokens, decoder_input_ids=tokens[:, :7]).logits


@pytest.mark.sample(5)
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers_and_the_way_back(tmp_path, case):
    model = reference(case)
    folder = saved(model, tmp_path / "in")
    ours = load(folder)
    for side in ("right", "left"):
        assert difference(model, ours, side) <= BOUND[torch.float32], side
    out = round_trip(model, folder, tmp_path, run)
    assert json.loads((out / "config.json").read_text())["model_type"] == model.config.model_type
    assert load_config(out) == ours.config
    double = reference(case, torch.float64)
    folder = saved(double, tmp_path / "double")
    # transformers computes the sinusoids of M2M-100 in float32
    bound = 1e-6 if case == "m2m_100" else BOUND[torch.float64]
    assert difference(double, load(folder), "left", torch.float64) <= bound


# A feature of a family turned off: the error must then be at least this large.
CONTROLS = {
    "embedding norm": ("bart", {"embedding__norm": False}, 1e-2),
    "offset": ("bart", {"position": c.Learned(), "max_len": 25}, 1e-2),
    "logits bias": ("bart", {"head__bias": False}, 1e-2),
    "post-norm": ("bart", {"placement": "pre"}, 1e-2),
    "scale": ("bart, scaled", {"embedding__scale": 1.0}, 1e-2),
    "pre-norm": ("mbart", {"placement": "post"}, 1e-2),
    "layout": ("marian", {"position": c.Sinusoidal()}, 1e-2),
    "activation": ("marian", {"feedforward__activation": "gelu"}, 1e-3),
    "spacing": ("m2m_100", {"position": c.Sinusoidal(layout="halves", offset=2)}, 1e-3),
    "first position": ("m2m_100", {"position": c.Sinusoidal(layout="halves", spacing="inclusive")}, 1e-3),
    "output scale": ("mt5", {"head__scale": 1 / 6}, 1e-2),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", CONTROLS)
def test_a_feature_that_is_turned_off_shows(tmp_path, name):
    case, changes, least = CONTROLS[name]
    model = reference(case)
    ours = load(saved(model, tmp_path))
    changed = build(c.replace(ours.config, **changes))
    changed.load_state_dict(ours.state_dict(), strict=False)
    assert difference(model, ours, "right") <= BOUND[torch.float32]
    assert difference(model, changed, "right") >= least


def test_every_family_is_in_the_table():
    own = {"T5"}  # a test file of its own
    assert {family.name for family in SEQ2SEQ} - own == {make()[1].model_type for make in CASES.values()}


PROMPTS = [
    torch.randint(5, 96, (int(n),), generator=torch.Generator().manual_seed(i)).tolist()
    for i, n in enumerate(torch.randint(1, 14, (12,), generator=torch.Generator().manual_seed(0)))
]


def generated(model, beams, n):
    """New tokens of transformers for a ragged batch padded on the right, each cut after its end."""
    width, pad, end = max(map(len, PROMPTS)), model.config.pad_token_id, model.config.eos_token_id
    rows = torch.tensor([p + [pad] * (width - len(p)) for p in PROMPTS])
    mask = torch.tensor([[1] * len(p) + [0] * (width - len(p)) for p in PROMPTS])
    out = model.generate(rows, attention_mask=mask, max_new_tokens=n, num_beams=beams, do_sample=False)[:, 1:].tolist()
    return [row[: row.index(end) + 1] if end in row else row[:n] for row in out]


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", ["bart", "bart, scaled", "mbart", "pegasus", "marian", "m2m_100", "mt5"])
def test_generated_tokens_equal_those_of_transformers(tmp_path, case):
    """Greedy and with three beams, with and without a cache; forced tokens included, and Marian without its padding."""
    model = reference(case)
    model.generation_config.bad_words_ids = [[1], [50], [51]] if case == "marian" else None
    ours = load(saved(model, tmp_path))
    ends = 0
    for beams in (1, 3):
        expected = generated(model, beams, 9)
        for cache in (True, False):
            assert gf.generate(ours, PROMPTS, 9, beams=beams, cache=cache).new == expected, (beams, cache)
        ends += sum(row[-1] == model.config.eos_token_id for row in expected)
    assert case in ("mt5", "m2m_100") or ends == 2 * len(PROMPTS)  # the others force their last token


def test_forced_and_suppressed_tokens_go_both_ways(tmp_path):
    model = reference("bart, scaled")
    model.generation_config.bad_words_ids = [[1], [5, 6]]
    model.generation_config.suppress_tokens = [7]
    ours = load(saved(model, tmp_path / "in"))
    special = c.Special(bos=0, eos=(2,), pad=1, start=2, forced_bos=0, forced_eos=2, suppressed=(1, 7))
    assert ours.config.special == special
    assert any("several tokens" in note for note in ours.origin.notes)
    assert load_config(save(ours, tmp_path / "out")).special == special


def test_a_base_model_is_read_without_the_bias_and_gets_a_zero_one(tmp_path):
    model = random_model(hf.BartModel, hf.BartConfig(**SIZES))
    ours = load(saved(model, tmp_path / "in"))
    assert ours.config.head == c.Head(tied=True)
    again = load(save(ours, tmp_path / "out"))
    assert again.config.head == c.Head(tied=True, bias=True)
    assert not again.head.bias.any()


def test_a_decoder_without_a_start_token_starts_as_in_transformers(tmp_path):
    ours = load(saved(reference("plbart"), tmp_path))
    assert ours.config.special.start == 0


@pytest.mark.parametrize(
    ("case", "changes", "words"),
    [
        ("bart", {"decoder_ffn_dim": 54}, "encoder_ffn_dim=53 and decoder_ffn_dim=54"),
        ("bart", {"encoder_attention_heads": 4}, "encoder_attention_heads=4 and decoder_attention_heads=6"),
        ("bart", {"is_decoder": True}, "a decoder alone"),
        ("marian", {"decoder_vocab_size": 98}, "a vocabulary of the decoder's own"),
        ("marian", {"share_encoder_decoder_embeddings": False}, "two token tables"),
        ("m2m_100", {"pad_token_id": 0}, "one after the padding id"),
    ],
)
def test_what_is_not_implemented_is_refused(tmp_path, case, changes, words):
    saved(reference(case), tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(WeightsError, match=words):
        load_config(tmp_path)


def test_copies_and_classifiers_in_published_files(tmp_path):
    folder = saved(reference("bart"), tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    table = tensors["model.shared.weight"]
    copies = {f"model.{stack}.embed_tokens.weight": table.clone() for stack in ("encoder", "decoder")}
    more = {"lm_head.weight": table.clone(), "classification_head.dense.weight": torch.ones(3, 3)}
    save_file({**tensors, **copies, **more, "model.encoder.version": torch.ones(1)}, file, metadata={"format": "pt"})
    ours = load(folder)
    assert ours.config.head.tied
    assert any("classifier" in note for note in ours.origin.notes)
