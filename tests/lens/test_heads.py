"""Head scores: hand-built patterns that score 1 and ones that must not, every kind of model, and TransformerLens."""

import json
import math

import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st

from glassformer import config as c
from glassformer.lens import heads as h
from glassformer.lens.circuit import as_model
from glassformer.lens.sites import LensError
from glassformer.lens.trace import trace
from glassformer.model import DecoderLM, build
from glassformer.weights import save
from tests.variants import POSITIONS, decoder, lively, ragged_mask, seq2seq, tokens

V = 61


def pointing(targets, size):
    """A causal pattern (T,T) whose query t attends to targets[t] alone, to itself where that is None."""
    pattern = torch.zeros(size, size)
    for t, s in enumerate(targets):
        pattern[t, t if s is None else s] = 1
    return pattern


def back(n, size):
    """A positional head: always n places back, the first tokens at the start."""
    return pointing([max(t - n, 0) for t in range(size)], size)


def uniform(size):
    return torch.ones(size, size).tril() / torch.arange(1, size + 1)[:, None]


def earlier(row, offset):
    """Places `offset` after the earlier occurrence of each token; None for new ones."""
    row = row.tolist()
    return [row.index(token) + offset if token in row[:t] else None for t, token in enumerate(row)]


def stack(make, ids):
    return torch.stack([make(row) for row in ids])[:, None]


rows = h.repeated_tokens(V, rows=32, seed=5)


def test_repeated_rows_have_blocks_of_random_length_and_position():
    sizes, starts = set(), set()
    for row in rows.tolist():
        seen = [t for t, token in enumerate(row) if token in row[:t]]
        size, start = len(seen), row.index(row[seen[0]])
        assert row[start : start + size] == row[start + size : start + 2 * size]
        assert len(set(row)) == len(row) - size
        assert 8 <= size <= 18
        sizes.add(size)
        starts.add(start)
    assert len(sizes) > 5
    assert len(starts) > 5
    assert torch.equal(rows, h.repeated_tokens(V, rows=32, seed=5))
    assert not torch.equal(rows, h.repeated_tokens(V, rows=32, seed=6))


@given(st.integers(10, 60), st.sampled_from([2, 3, 4]), st.integers(0, 10**6), st.sets(st.integers(0, 69), max_size=5))
def test_only_the_copies_repeat_and_excluded_ids_never_occur(length, copies, seed, exclude):
    (row,) = h.repeated_tokens(70, rows=1, length=length, copies=copies, seed=seed, exclude=exclude).tolist()
    assert len(row) == length
    assert not set(row) & exclude
    counts = {row.count(token) for token in row}
    assert counts <= {1, copies}
    assert copies in counts


def test_each_score_is_one_on_its_own_pattern():
    assert h.induction_score(stack(lambda r: pointing(earlier(r, 1), 40), rows), rows).item() == 1
    assert h.duplicate_token_score(stack(lambda r: pointing(earlier(r, 0), 40), rows), rows).item() == 1
    assert h.previous_token_score(back(1, 40)).item() == 1
    assert h.current_token_score(torch.eye(40)).item() == 1
    assert h.first_token_score(back(40, 40)).item() == 1


def test_positional_heads_are_no_induction_heads():
    for n in range(1, 25):
        assert h.induction_score(back(n, 40).expand(32, 1, 40, 40), rows).item() < 0.3, n
    # on the one toy sequence of the exercise, two back is indistinguishable from induction
    toy = torch.tensor([1, 2, 3, 1, 2])
    assert h.induction_score(back(2, 5), toy).item() == 1
    assert h.induction_score(pointing([0, 1, 2, 1, 2], 5), toy).item() == 1


def test_other_patterns_score_low_everywhere():
    for score in (h.previous_token_score, h.current_token_score, h.first_token_score):
        assert score(back(2, 40)).item() < 0.06
    assert h.duplicate_token_score(back(2, 40).expand(32, 1, 40, 40), rows).item() < 0.06
    assert h.induction_score(stack(lambda r: pointing(earlier(r, 0), 40), rows), rows).item() == 0
    assert h.duplicate_token_score(stack(lambda r: pointing(earlier(r, 1), 40), rows), rows).item() == 0


def test_uniform_attention_scores_one_over_the_keys_in_view():
    pattern, row = uniform(40), rows[0]
    inverse = 1 / torch.arange(1, 41, dtype=torch.float64)
    scored = [t for t, s in enumerate(earlier(row, 1)) if s is not None]
    assert h.induction_score(pattern, row).item() == pytest.approx(inverse[scored].mean().item(), rel=1e-6)
    assert h.duplicate_token_score(pattern, row).item() == pytest.approx(inverse[scored].mean().item(), rel=1e-6)
    for score in (h.previous_token_score, h.current_token_score, h.first_token_score):
        assert score(pattern).item() == pytest.approx(inverse[1:].mean().item(), rel=1e-6)
    nats, relative = h.attention_entropy(pattern)
    assert nats.item() == pytest.approx(torch.arange(2, 41).double().log().mean().item(), rel=1e-6)
    assert relative.item() == pytest.approx(1, rel=1e-6)
    assert h.attention_distance(pattern).item() == pytest.approx(
        torch.arange(1, 40).double().mean().item() / 2, rel=1e-6
    )


def test_every_earlier_copy_counts_for_prefix_matching():
    ids = torch.tensor([7, 8, 7, 9, 7])
    half = torch.eye(5)
    half[2] = torch.tensor([0, 1.0, 0, 0, 0])
    half[4] = torch.tensor([0, 0.5, 0, 0.5, 0])
    assert h.induction_score(half, ids).item() == 1


def test_entropy_and_distance_of_a_head_that_points():
    nats, relative = h.attention_entropy(back(3, 40))
    assert nats.item() == relative.item() == 0
    assert h.attention_distance(back(3, 40)).item() == pytest.approx((1 + 2 + 37 * 3) / 39)


@given(st.integers(0, 10**6), st.integers(2, 9))
def test_scores_are_shares_and_heads_are_scored_alone(seed, size):
    generator = torch.Generator().manual_seed(seed)
    pattern = torch.rand(2, 3, size, size, generator=generator).tril()
    pattern = pattern / pattern.sum(-1, keepdim=True)
    ids = torch.randint(0, 3, (2, size), generator=generator)
    for score in (h.induction_score, h.duplicate_token_score):
        found = score(pattern, ids)
        assert found.shape == (3,)
        assert ((found >= 0) & (found <= 1 + 1e-6) | found.isnan()).all()
        torch.testing.assert_close(found[1:2], score(pattern[:, 1:2], ids), equal_nan=True)
    first = h.previous_token_score(pattern)
    total = first + h.current_token_score(pattern)
    assert (total <= 1 + 1e-6).all()
    assert (h.attention_entropy(pattern)[1] <= 1 + 1e-6).all()


def test_a_score_that_no_query_can_have_is_nan_not_zero():
    distinct = torch.arange(7)
    assert h.induction_score(uniform(7), distinct).isnan()
    assert h.duplicate_token_score(uniform(7), distinct).isnan()
    assert h.previous_token_score(uniform(1)).isnan()
    assert h.attention_entropy(uniform(1))[0].isnan()


def test_the_hand_built_model_is_found_by_the_table():
    table = h.head_table(as_model(60, 42), rows=8)
    second, first = table.ranked("induction").rows
    assert (first.layer, second.layer) == (0, 1)
    assert second.scores["induction"] == pytest.approx(1, abs=1e-3)
    assert second.scores["prefix_matching"] == pytest.approx(1, abs=1e-3)
    assert second.scores["copying"] == pytest.approx(1, abs=1e-9)
    assert second.scores["copying_top"] == 1
    assert second.scores["previous_token"] < 0.2
    assert first.scores["previous_token"] == pytest.approx(1, abs=1e-3)
    assert first.scores["induction"] < 0.01
    assert first.scores["copying"] is None  # what head 1 writes, no logit reads


@pytest.mark.parametrize("position", POSITIONS)
def test_every_position_scheme_and_grouped_heads_can_be_scored(position):
    model, _ = lively(decoder(position=POSITIONS[position]))
    table = h.head_table(model, tokens(2, 13), rows=3)
    assert len(table.rows) == 12
    assert not table.notes
    for row in table.rows:
        assert all(value is not None and math.isfinite(value) for value in row.scores.values())
        assert 0 <= row.scores["relative_entropy"] <= 1


def test_table_scores_are_those_of_the_traced_patterns():
    model, _ = lively(decoder())
    text = tokens(2, 13)
    table = h.head_table(model, text, rows=4, length=20, seed=3)
    run = trace(model, h.repeated_tokens(31, 4, 20, 2, 3))
    wanted = h.induction_score(run["blocks.1.attention.pattern"], run.tokens)
    torch.testing.assert_close(table.score("induction")[1], wanted)
    pattern = trace(model, text)["blocks.0.attention.pattern"]
    torch.testing.assert_close(table.score("text_first_token")[0], pattern[:, :, 1:, 0].mean((0, 2)))
    torch.testing.assert_close(table.score("text_entropy")[0], h.attention_entropy(pattern)[0])


def test_where_a_window_hides_every_target_the_score_is_none():
    window = c.Attention(6, n_kv_heads=2, d_head=4, window=4, window_layers=(1,))
    model, _ = lively(decoder(attention=window, position=c.Rotary(), max_len=None))
    table = h.head_table(model, rows=4)
    assert table.score("induction")[0].isfinite().all()
    assert table.score("induction")[1].isnan().all()
    assert table.score("duplicate_token")[1].isnan().all()
    assert table.score("previous_token").isfinite().all()
    assert "too short" in table.notes["induction"]
    # a few queries see the first token, and those count: a window of 4 shows it to three of them
    seen = trace(model, h.repeated_tokens(31, 4, 38))["blocks.1.attention.pattern"][:, :, 1:4, 0]
    torch.testing.assert_close(table.score("first_token")[1], seen.mean((0, 2)))


def test_encoders_have_no_induction_and_look_both_ways_for_duplicates():
    base = {"vocab_size": V, "d_model": 12, "n_layers": 1, "max_len": 50}
    base |= {"attention": c.Attention(3), "feedforward": c.Dense(8)}
    model, _ = lively(c.EncoderConfig(**base, head=c.Head(transform="gelu")))
    table = h.head_table(model, rows=4, length=30)
    for name in ("induction", "prefix_matching", "copying", "copying_top"):
        assert table.score(name).isnan().all()
        assert table.notes[name]
    ids = h.repeated_tokens(V, 4, 30)
    pattern = trace(model, ids)["blocks.0.attention.pattern"]
    same = (ids[:, :, None] == ids[:, None, :]) & ~torch.eye(30, dtype=torch.bool)
    wanted = (pattern * same[:, None]).sum((0, 2, 3)) / same.any(-1).sum()
    torch.testing.assert_close(table.score("duplicate_token")[0], wanted)
    plain, _ = lively(c.EncoderConfig(**base))
    assert h.head_table(plain, rows=2).score("copying").isfinite().all()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_in_a_text_changes_no_score(side):
    model, _ = lively(decoder())
    text = tokens(1, 9)
    pad = torch.zeros(1, 4, dtype=torch.long)
    padded = torch.cat([pad, text] if side == "left" else [text, pad], dim=1)
    alone = h.head_table(model, text, rows=1)
    padded_table = h.head_table(model, padded, ragged_mask([9], 13, side), rows=1)
    for name in ("text_entropy", "text_relative_entropy", "text_distance", "text_first_token"):
        torch.testing.assert_close(alone.score(name), padded_table.score(name), atol=1e-12, rtol=0)


def test_random_rows_start_with_bos_where_there_is_one_and_avoid_special_ids():
    model, _ = lively(decoder(special=c.Special(bos=4, eos=(5,), pad=6), max_len=29))
    table = h.head_table(model, rows=2, seed=1)
    ids = torch.nn.functional.pad(h.repeated_tokens(31, 2, 28, 2, 1, {4, 5, 6}), (1, 0), value=4)
    pattern = trace(model, ids)["blocks.0.attention.pattern"]
    torch.testing.assert_close(table.score("first_token")[0], pattern[:, :, 1:, 0].mean((0, 2)))
    assert not set(ids[:, 1:].flatten().tolist()) & {4, 5, 6}


def test_the_table_ranks_prints_and_goes_to_json():
    model, _ = lively(decoder())
    table = h.head_table(model, rows=2)
    order = [row.scores["distance"] for row in table.ranked("distance").rows]
    assert order == sorted(order, reverse=True)
    lines = table.text("distance", top=4).splitlines()
    best = table.ranked("distance").rows[0]
    assert lines[2].split()[:2] == [str(best.layer), str(best.head)]
    assert f"{best.scores['distance']:.3f}" in lines[2]
    assert len(lines) == 2 + 4
    loaded = json.loads(json.dumps(table.to_dict()))
    assert loaded["heads"][0]["induction"] == table.rows[0].scores["induction"]
    assert len(loaded["heads"]) == 12
    assert h.head_table(model, rows=2, weights=False).names == table.names[:-2]
    assert table.rows == h.head_table(model, rows=2).rows


def test_missing_scores_are_dashes_explained_below():
    text = h.head_table(as_model(60, 42), rows=1).text("copying")
    last = text.splitlines()[3].split()
    assert last[:2] == ["0", "0"]
    assert "–" in last
    assert "– copying: the path from this attention head to the logits is not linear" in text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: h.head_table(lively(seq2seq())[0]), "not an encoder-decoder"),
        (lambda: h.head_table(lively(decoder(vocab_size=7))[0]), "7 ordinary tokens leave no room"),
        (lambda: h.head_table(lively(decoder(max_len=9))[0]), "a context of 9 and 31 ordinary tokens leave no room"),
        (lambda: h.head_table(lively(decoder())[0], length=30), "more than the context of 29"),
        (lambda: h.repeated_tokens(20, length=40), "20 ordinary tokens is too small for 40 positions .* which need 32"),
        (lambda: h.repeated_tokens(20, length=6, copies=4), "give at least 1 row, 2 copies and 8 tokens"),
        (
            lambda: h.head_table(lively(decoder())[0], rows=1).ranked("inducton"),
            "'inducton' is not a score .* induction",
        ),
    ],
)
def test_bad_input_is_refused_in_a_sentence(call, message):
    with pytest.raises(LensError, match=message):
        call()


def gpt2_shaped_circuit():
    """The hand-built circuit inside GPT-2's shape: each number next to its negative, so that LayerNorm's mean is zero;
    an empty feed-forward; a second head in each layer that attends at random and writes nothing."""
    small = as_model(60, 42)
    width, n = small.config.d_model, small.config.d_head
    config = c.DecoderConfig(
        vocab_size=61, d_model=2 * width, n_layers=2, attention=c.Attention(2), feedforward=c.Dense(4), max_len=42
    )
    model = build(config, dtype=torch.float64)
    assert isinstance(model, DecoderLM)
    source, target = small.state_dict(), model.state_dict()
    for name in ("embed.tokens.weight", "decoder.position.weight"):
        target[name].copy_(torch.cat([source[name], -source[name]], dim=1))
    scale = small.config.scale / config.scale
    for layer in range(2):
        at = f"decoder.blocks.{layer}."
        for part, size in (("q", n), ("k", n), ("v", 61)):
            weight = target[f"{at}attention.{part}.weight"]
            weight[:width] = 0
            weight[:size, :width] = source[f"{at}attention.{part}.weight"] * (scale if part == "q" else 1)
            weight[width:] *= 30
        out = target[f"{at}attention.o.weight"]
        out.zero_()
        out[:, :61] = torch.cat([source[f"{at}attention.o.weight"], -source[f"{at}attention.o.weight"]])
        target[f"{at}feedforward.down.weight"].zero_()
    return model


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore")  # TransformerLens' own
@pytest.mark.parametrize("kind", ["circuit", "random"])
def test_induction_agrees_with_transformer_lens(tmp_path, kind):
    """`detect_head` divides the attention on targets by all T queries, we by those that have one: T / n aligns them."""
    from transformer_lens.head_detector import detect_head
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    if kind == "circuit":
        model = gpt2_shaped_circuit().float()
    else:
        size = {"vocab_size": 61, "d_model": 32, "n_layers": 2, "max_len": 42}
        model = lively(c.DecoderConfig(**size, attention=c.Attention(4), feedforward=c.Dense(64)), std=0.6)[0].float()
    save(model, tmp_path, format="hf")
    peer = hf.GPT2LMHeadModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
    bridge = build_bridge_from_module(peer, "GPT2LMHeadModel", hf_config=peer.config)
    compared = []
    for row in torch.nn.functional.pad(h.repeated_tokens(60, rows=6, seed=2), (1, 0), value=60):  # 60 is BOS
        ids = row[None]
        bridge.to_tokens = lambda seq, ids=ids: ids
        theirs = detect_head(bridge, "random tokens", "induction_head")
        run = trace(model, ids)
        ours = torch.stack([h.induction_score(run[f"blocks.{i}.attention.pattern"], ids) for i in range(2)])
        scored = sum(s is not None for s in earlier(row, 1))
        compared.append((ours, theirs * len(row) / scored))
        assert (ours - compared[-1][1]).abs().max().item() < 1e-4
    ours, theirs = (torch.stack(side).mean(0) for side in zip(*compared, strict=True))
    assert (ours - theirs).abs().max().item() < 0.05
    if kind == "circuit":
        assert ours[1, 0] > 0.99
        assert theirs[1, 0] > 0.99
        assert ours[0].max() < 0.3
