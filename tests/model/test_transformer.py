"""The engine against the oracle in float64, over every variant a config can say, and the initial weights."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glassformer import config as c
from glassformer.config import presets
from glassformer.model import build, masks, n_parameters, transformer
from glassformer.model.transformer import distribution
from glassformer.reference import encode, forward, forward_seq2seq, loss_and_gradients, pool, prefix_mask, shapes
from tests import variants
from tests.sampled import examples
from tests.variants import lively, ragged_mask, tokens

# Two float64 implementations of two layers of width 14 differ by summation order alone: measured at most 3e-14 here.
BOUND = 1e-10
paddings = st.sampled_from([None, "left", "right"])


def difference(engine: torch.Tensor, oracle: np.ndarray, mask: torch.Tensor | None = None) -> float:
    assert engine.shape == oracle.shape
    delta = (engine.detach() - torch.from_numpy(oracle)).abs()
    return float((delta if mask is None else delta[mask]).max())


@settings(max_examples=examples(120))
@given(config=variants.decoders, padding=paddings, seed=st.integers(0, 99))
def test_decoder_equals_oracle(config, padding, seed):
    model, params = lively(config, seed)
    ids = tokens(3, 13, seed)
    mask = None if padding is None else ragged_mask([13, 7, 1], 13, padding)
    assert difference(model(ids, mask=mask), forward(config, params, ids, mask=mask), mask) <= BOUND


@settings(max_examples=examples(60))
@given(config=variants.encoders, padding=paddings, seed=st.integers(0, 99))
def test_encoder_equals_oracle(config, padding, seed):
    model, params = lively(config, seed)
    ids = tokens(3, 13, seed)
    mask = None if padding is None else ragged_mask([13, 7, 1], 13, padding)
    segments = tokens(3, 13, seed + 1, vocab=3) if config.embedding.n_segments else None
    logits = forward(config, params, ids, mask=mask, segments=segments)
    assert difference(model(ids, mask=mask, segments=segments), logits, mask) <= BOUND
    hidden = encode(config, params, ids, mask=mask, segments=segments)
    assert difference(model.encode(ids, mask=mask, segments=segments), hidden, mask) <= BOUND
    if config.pooler:
        assert difference(model.pool(torch.from_numpy(hidden)), pool(config, params, hidden)) <= BOUND


@settings(max_examples=examples(60))
@given(config=variants.seq2seqs, padding=paddings, seed=st.integers(0, 99))
def test_seq2seq_equals_oracle(config, padding, seed):
    model, params = lively(config, seed)
    source, target = tokens(3, 11, seed), tokens(3, 7, seed + 1)
    source_mask = None if padding is None else ragged_mask([11, 5, 1], 11, padding)
    mask = None if padding is None else ragged_mask([7, 3, 1], 7, padding)
    expected = forward_seq2seq(config, params, source, target, source_mask=source_mask, mask=mask)
    assert difference(model(source, target, source_mask=source_mask, mask=mask), expected, mask) <= BOUND


@settings(max_examples=examples(80))
@given(
    config=variants.decoders,
    padding=paddings,
    kind=st.sampled_from(["growing", "static", "fixed", "windowed"]),
    cuts=st.lists(st.integers(1, 12), max_size=6),
    seed=st.integers(0, 99),
)
def test_cached_steps_equal_oracle(config, padding, kind, cuts, seed):
    """Chunks of any size through every kind of cache give the oracle's full pass."""
    if kind == "windowed" and config.attention.window is None:
        kind = "growing"
    model, params = lively(config, seed)
    ids = tokens(3, 13, seed)
    mask = None if padding is None else ragged_mask([13, 7, 1], 13, padding)
    expected = forward(config, params, ids, mask=mask)
    cache = model.new_cache("static" if kind == "fixed" else kind, capacity=13, fixed=kind == "fixed")
    edges = [0, *sorted(set(cuts)), 13]
    with torch.no_grad():
        steps = [
            model(ids[:, a:b], mask=None if mask is None else mask[:, a:b], cache=cache)
            for a, b in itertools.pairwise(edges)
        ]
    assert difference(torch.cat(steps, dim=1), expected, mask) <= BOUND


@settings(max_examples=examples(30))
@given(config=variants.seq2seqs, kind=st.sampled_from(["growing", "static", "fixed"]), seed=st.integers(0, 99))
def test_cached_seq2seq_steps_equal_oracle(config, kind, seed):
    model, params = lively(config, seed)
    source, target = tokens(2, 11, seed), tokens(2, 7, seed + 1)
    source_mask = ragged_mask([11, 5], 11, "right")
    expected = forward_seq2seq(config, params, source, target, source_mask=source_mask)
    cache = model.new_cache("static" if kind == "fixed" else kind, capacity=7, fixed=kind == "fixed")
    with torch.no_grad():
        steps = [model(source, target[:, a:b], source_mask, cache=cache) for a, b in [(0, 3), (3, 4), (4, 7)]]
    assert difference(torch.cat(steps, dim=1), expected) <= BOUND


@pytest.mark.parametrize("name", variants.POSITIONS)
def test_explicit_positions_equal_oracle(name):
    config = variants.decoder(position=variants.POSITIONS[name])
    model, params = lively(config)
    ids, positions = tokens(2, 7), torch.tensor([[3, 4, 9, 9, 0, 1, 28], [0, 2, 4, 6, 8, 10, 12]])
    assert difference(model(ids, positions=positions), forward(config, params, ids, positions=positions)) <= BOUND


def test_prefix_mask_equals_oracle():
    config = variants.decoder()
    model, params = lively(config)
    ids = tokens(2, 7)
    engine_mask = masks.prefix(torch.tensor([3, 5]), 7)
    assert np.array_equal(engine_mask.numpy(), prefix_mask([3, 5], 7))
    assert difference(model(ids, mask=engine_mask), forward(config, params, ids, mask=engine_mask)) <= BOUND


def test_dropping_the_causal_mask_is_the_only_change_between_decoder_and_encoder():
    """Same weights, and a decoder given a full pattern, make an encoder; names differ by the stack's name alone."""
    spec = variants.decoder()
    fields = {name: getattr(spec, name) for name in ("vocab_size", "d_model", "n_layers", "attention", "feedforward")}
    encoder = build(c.EncoderConfig(**fields, max_len=spec.max_len), dtype=torch.float64)
    decoder = build(spec, dtype=torch.float64)
    renamed = {k.replace("decoder.", "encoder."): v for k, v in decoder.state_dict().items()}
    encoder.load_state_dict(renamed)
    ids = tokens(2, 7)
    everything = torch.ones(2, 7, 7, dtype=torch.bool)
    assert torch.equal(decoder(ids, mask=everything), encoder(ids, mask=everything))
    assert (decoder(ids) - encoder(ids)).abs().max() > 1e-6


@settings(max_examples=examples(40))
@given(config=variants.decoders, seed=st.integers(0, 99))
def test_future_tokens_do_not_change_past_logits(config, seed):
    """Exactly, when shapes are equal: a masked score is -inf and its weight 0, so the future enters no sum."""
    model, _ = lively(config, seed)
    ids = tokens(2, 11, seed)
    changed = ids.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % variants.V
    before, after = model(ids)[:, :7], model(changed)[:, :7]
    # a mixture of experts groups tokens by expert: other matrix shapes, other rounding
    feedforwards = [config.layer_feedforward(layer) for layer in range(config.n_layers)]
    bound = 1e-12 if any(isinstance(one, c.MoE) for one in feedforwards) else 0.0
    assert (before - after).abs().max() <= bound


@settings(max_examples=examples(40))
@given(config=variants.decoders, side=st.sampled_from(["left", "right"]))
def test_padding_content_is_inert(config, side):
    model, _ = lively(config)
    ids, mask = tokens(3, 11), ragged_mask([11, 6, 2], 11, side)
    junk = torch.where(mask, ids, (ids + 5) % variants.V)
    assert (model(ids, mask=mask) - model(junk, mask=mask))[mask].abs().max() <= 1e-12


@settings(max_examples=examples(60))
@given(config=variants.decoders, padding=paddings, seed=st.integers(0, 99))
def test_autograd_equals_the_hand_derived_gradients(config, padding, seed):
    """Every parameter's gradient of the next-token loss, relative to the largest entry of any of them."""
    model, params = lively(config, seed)
    ids = tokens(3, 13, seed)
    mask = None if padding is None else ragged_mask([13, 7, 2], 13, padding)
    targets = torch.cat([ids[:, 1:], torch.full((3, 1), -100)], dim=1)
    if mask is not None:
        targets = targets.masked_fill(~mask, -100)
    value = torch.nn.functional.cross_entropy(model(ids, mask=mask).flatten(0, 1), targets.flatten())
    value.backward()
    expected_value, expected = loss_and_gradients(config, params, ids.numpy(), targets.numpy(), mask=mask)
    assert abs(value.item() - expected_value) <= 1e-12
    scale = max(1.0, max(float(np.abs(g).max()) for g in expected.values()))
    assert expected.keys() == model.state_dict().keys()
    assert not any(expected[name].any() for name, _ in model.named_buffers()), (
        "a correction only takes part in a choice"
    )
    for name, p in model.named_parameters():
        got = np.zeros(p.shape) if p.grad is None else p.grad.numpy()
        assert np.abs(got - expected[name]).max() <= 1e-8 * scale, name


def test_one_token_works_everywhere():
    for name, position in variants.POSITIONS.items():
        model, params = lively(variants.decoder(position=position))
        ids = tokens(1, 1)
        assert difference(model(ids), forward(model.config, params, ids)) <= BOUND, name


@pytest.mark.parametrize("position", [c.Rotary(), c.Alibi(), c.T5Bias(buckets=8, max_distance=20), c.NoPosition()])
def test_relative_schemes_ignore_a_shift_of_all_positions(position):
    model, _ = lively(variants.decoder(position=position))
    ids, here = tokens(2, 9), torch.arange(9)[None]
    assert (model(ids, positions=here) - model(ids, positions=here + 1000)).abs().max() <= 1e-9


@pytest.mark.parametrize("position", [c.Learned(), c.Sinusoidal()])
def test_absolute_schemes_notice_a_shift(position):
    model, _ = lively(variants.decoder(position=position))
    ids, here = tokens(2, 9), torch.arange(9)[None]
    assert (model(ids, positions=here) - model(ids, positions=here + 10)).abs().max() > 1e-3


def test_tied_head_is_the_same_parameter_and_saves_exactly_v_times_d():
    tied, untied = build(variants.decoder()), build(variants.decoder(head=c.Head(tied=False)))
    assert n_parameters(untied) - n_parameters(tied) == variants.V * variants.D
    assert "head.weight" not in tied.state_dict()
    with torch.no_grad():
        untied.load_state_dict({**tied.state_dict(), "head.weight": tied.embed.tokens.weight})
    ids = tokens(2, 5)
    assert torch.equal(tied(ids), untied(ids))


def test_gradients_reach_every_parameter():
    """Except a key bias, which shifts all scores of a query alike and so has none; it must be exactly that one."""
    model, _ = lively(variants.decoder(norm=c.RMSNorm(), position=c.Rotary()))
    logits = model(tokens(2, variants.MAX_LEN))
    (logits * torch.randn_like(logits)).sum().backward()
    dead = {name for name, p in model.named_parameters() if p.grad is None or p.grad.abs().max() < 1e-12}
    assert dead <= {"decoder.blocks.0.attention.k.bias", "decoder.blocks.1.attention.k.bias"}


def test_a_model_without_head_says_so():
    model = build(c.replace(variants.decoder(), head=None))
    with pytest.raises(ValueError, match="no head"):
        model(tokens(1, 3))
    assert model.encode(tokens(1, 3)).shape == (1, 3, variants.D)


def test_a_source_of_padding_alone_is_refused():
    with pytest.raises(ValueError, match="a source sequence is all padding"):
        build(variants.seq2seq())(tokens(2, 3), tokens(2, 3), source_mask=ragged_mask([3, 0], 3, "right"))


def test_an_empty_row_of_a_whole_pattern_sees_itself():
    config = variants.decoder()
    model, params = lively(config)
    ids, pattern = tokens(1, 5), torch.ones(1, 5, 5, dtype=torch.bool).tril()
    pattern[0, 2] = False
    assert difference(model(ids, mask=pattern), forward(config, params, ids, mask=pattern)) <= BOUND


def test_seq2seq_decoder_without_memory_says_so():
    model = build(variants.seq2seq())
    with pytest.raises(ValueError, match="no encoder output"):
        model.decode(tokens(1, 3), None)


@settings(max_examples=examples(60))
@given(config=variants.decoders | variants.encoders | variants.seq2seqs)
def test_names_and_shapes_are_the_documented_ones(config):
    """The oracle states the shapes of docs/shapes.md on its own; the engine must have exactly those."""
    engine = {name: tuple(p.shape) for name, p in build(config, device="meta").state_dict().items()}
    assert engine == {name: tuple(shape) for name, shape in shapes(config).items()}
    assert {distribution(name) for name in engine} <= {"one", "zero", "normal", "residual"}


def test_an_unknown_parameter_has_no_silent_default():
    with pytest.raises(KeyError, match="mystery"):
        distribution("mystery")


def test_same_seed_same_weights_whatever_the_dtype():
    a, b, other = (
        build(variants.decoder(), 3),
        build(variants.decoder(), 3, dtype=torch.float64),
        build(variants.decoder(), 4),
    )
    for name, value in a.state_dict().items():
        assert torch.equal(value.double(), b.state_dict()[name])
    assert not torch.equal(a.embed.tokens.weight, other.embed.tokens.weight)


def test_a_built_model_is_in_evaluation_mode():
    model = build(variants.decoder(dropout=0.5))
    assert not model.training
    assert torch.equal(model(tokens(1, 5)), model(tokens(1, 5)))


def test_building_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    build(variants.decoder())
    assert torch.equal(before, torch.get_rng_state())


def test_standard_deviations_are_those_of_the_table():
    model = build(variants.decoder(d_model=120, d_ff=480, n_layers=8, attention=c.Attention(n_heads=6)))
    state = model.state_dict()
    assert float(state["embed.tokens.weight"].std()) == pytest.approx(0.02, rel=0.05)
    assert float(state["decoder.blocks.3.attention.q.weight"].std()) == pytest.approx(0.02, rel=0.05)
    for name in ("attention.o", "feedforward.down"):
        assert float(state[f"decoder.blocks.3.{name}.weight"].std()) == pytest.approx(0.02 / 4, rel=0.05)
    assert (state["decoder.norm.weight"] == 1).all()
    assert (state["decoder.blocks.0.attention.q.bias"] == 0).all()


def test_an_attention_only_stream_has_half_the_branches():
    shape = {"d_model": 120, "attention": c.Attention(n_heads=6), "feedforward": c.NoFeedForward()}
    alone = build(variants.decoder(**shape, n_layers=4)).state_dict()
    assert float(alone["decoder.blocks.3.attention.o.weight"].std()) == pytest.approx(0.02 / 2, rel=0.05)
    both = build(variants.seq2seq(**shape, n_layers=8, n_encoder_layers=4)).state_dict()
    assert float(both["encoder.blocks.3.attention.o.weight"].std()) == pytest.approx(0.02 / 2, rel=0.05)
    assert float(both["decoder.blocks.3.cross.o.weight"].std()) == pytest.approx(0.02 / 4, rel=0.05)


@pytest.mark.parametrize("name", ["nano", "llama_tiny", "moe_tiny"])
def test_first_loss_is_close_to_ln_v(name):
    config = presets.get(name)
    model = build(config)
    ids = tokens(4, 64, vocab=config.vocab_size)
    loss = torch.nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert abs(loss.item() - math.log(config.vocab_size)) < 0.1


def test_meta_device_allocates_nothing():
    model = build(presets.gpt2_xl(), device="meta")
    assert all(p.is_meta for p in model.parameters())


def test_building_for_shapes_is_quick_and_leaves_torchs_own_first_values_out(monkeypatch):
    for name in ("normal_", "uniform_", "kaiming_uniform_"):
        monkeypatch.setattr(
            torch.Tensor, name, lambda *given, **more: pytest.fail("a tensor was filled"), raising=False
        )
    build(presets.bert_base(n_layers=1), device="meta")
    assert torch.nn.init.ones_(torch.empty(2)).tolist() == [1, 1]  # elsewhere it fills as ever


def test_only_the_three_kinds_can_be_built():
    with pytest.raises(TypeError, match=r"cannot build a model from Dense|violates type hint .*ModelConfig"):
        build(c.Dense(d_ff=3))


def drawn_in_order(config, seed):
    """The first weights, drawn one tensor after the other and part after part in one thread."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for name, parameter in build(config, device="meta").named_parameters():
        kind, n = distribution(name), parameter.numel()
        if kind in ("one", "zero"):
            found[name] = torch.full(parameter.shape, float(kind == "one"))
            continue
        std = config.init_std / (math.sqrt(2 * config.n_layers) if kind == "residual" else 1)
        if n <= 2**20:
            found[name] = torch.empty(parameter.shape).normal_(0.0, std, generator=generator)
            continue
        first = int(torch.randint(2**32, (), generator=generator))
        own = (torch.Generator().manual_seed((first + part) % 2**32) for part in range(-(-n // 2**20)))
        sizes = (min(2**20, n - at) for at in range(0, n, 2**20))
        parts = [torch.empty(size).normal_(0.0, std, generator=one) for size, one in zip(sizes, own, strict=True)]
        found[name] = torch.cat(parts).view(parameter.shape)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 4])
def test_a_seed_gives_the_same_first_weights_with_any_number_of_threads(threads, dtype):
    before = torch.get_num_threads()
    config = presets.gpt2(n_layers=1, d_model=192, n_heads=3)  # of two matrices, one is drawn in parts
    wanted = drawn_in_order(config, 3)
    torch.set_num_threads(threads)
    try:
        found = build(config, seed=3, dtype=dtype).state_dict()
    finally:
        torch.set_num_threads(before)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value.to(dtype)) for name, value in wanted.items())


def test_first_values_one_by_one_are_those_of_a_model():
    config = presets.gpt2(n_layers=1, d_model=192, n_heads=3)
    wanted = build(config, seed=3).state_dict()
    found = dict(transformer.initial_values(build(config, device="meta"), 3))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_parts_of_a_large_matrix_are_drawn_from_seeds_of_their_own(monkeypatch):
    monkeypatch.setattr(transformer, "DRAWN_AT_ONCE", 1000)
    matrix = build(presets.nano(vocab_size=101), seed=3).embed.tokens.weight.detach()
    parts = matrix.view(-1).split(1000)
    assert len({tuple(part[:3].tolist()) for part in parts}) == len(parts) > 2
    assert abs(float(matrix.mean())) < 0.001
    assert float(matrix.std()) == pytest.approx(0.02, rel=0.05)
    assert not torch.equal(matrix, build(presets.nano(vocab_size=101), seed=4).embed.tokens.weight)


def test_an_error_while_drawing_is_raised(monkeypatch):
    monkeypatch.setattr(transformer, "DRAWN_AT_ONCE", 1000)
    monkeypatch.setattr(transformer, "_draw", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        build(presets.nano())
