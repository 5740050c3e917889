"""The compiled step against the engine: every variant it claims to know, every precision, any number of threads."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glassformer import config as c
from glassformer.config import presets
from glassformer.kernels.cpu.decode import NativeDecoder, NativeError, library, unsupported_config
from glassformer.kernels.cpu.decode.decoder import default_threads
from glassformer.kernels.cpu.decode.pack import group_of, packed_as, quantise
from glassformer.kernels.toolchain import cxx
from glassformer.model import build
from glassformer.model.context import NO_TAP
from glassformer.model.moe import Router
from tests import variants
from tests.sampled import examples
from tests.variants import decoder, lively, tokens

pytestmark = pytest.mark.skipif(cxx.compiler() is None, reason="no C++ compiler here")
KNOWN = {name: p for name, p in variants.POSITIONS.items() if unsupported_config(decoder(position=p)) is None}


def float_model(config, std=0.3):
    return lively(config, std=std)[0].float()


def stepped(model, ids, **settings):
    native = NativeDecoder(model, rows=len(ids), capacity=ids.shape[1], **settings)
    return torch.stack([native.step(ids[:, t]) for t in range(ids.shape[1])], dim=1)


class HalfCache:
    """A tap that rounds keys and values as a cache in float16 does."""

    def __call__(self, site, value):
        is_kept = site.endswith(("attention.k", "attention.v"))
        return value.clamp(-65504, 65504).half().to(value.dtype) if is_kept else value

    def wants(self, site):
        return False


def relative(found, wanted):
    return float((found - wanted).abs().max() / wanted.abs().max())


@settings(max_examples=examples(40))
@given(config=variants.decoders)
def test_steps_equal_one_full_pass_for_every_variant_that_is_known(config):
    model = float_model(config)
    if unsupported_config(config) is not None:
        with pytest.raises(NativeError, match="engine='torch'"):
            NativeDecoder(model)
        return
    ids = tokens(3, 12, vocab=config.vocab_size)
    with torch.no_grad():
        assert relative(stepped(model, ids), model(ids)) < 2e-5


@settings(max_examples=examples(30))
@given(config=variants.decoders, chunk=st.sampled_from([None, 1, 7, 16, 20]))
def test_prompts_of_any_length_read_at_once_or_in_chunks_equal_each_alone(config, chunk):
    """Rows of 1 to 45 tokens side by side: products of few and of many vectors, runs that a chunk cuts."""
    config = c.replace(config, max_len=64)
    if unsupported_config(config) is not None:
        return
    model = float_model(config)
    prompts = [tokens(1, n, vocab=config.vocab_size, seed=n)[0].tolist() for n in (1, 45, 5, 17)]
    native = NativeDecoder(model, rows=4, capacity=64)
    found, after = native.read(prompts, chunk), native.step(torch.tensor([1, 2, 3, 4]))
    for row, prompt in enumerate(prompts):
        with torch.no_grad():
            whole = model(torch.tensor([[*prompt, row + 1]]))[0]
        assert relative(found[row], whole[-2]) < 3e-5
        assert relative(after[row], whole[-1]) < 3e-5


def test_what_is_counted_until_weights_move_to_huge_pages(monkeypatch):
    """The tokens for which there is room after the first prompts: a long prompt alone moves nothing."""
    counted = []
    monkeypatch.setattr("glassformer.kernels.cpu.decode.decoder.settle", lambda model, n: counted.append((model, n)))
    model = float_model(decoder(max_len=64))
    native = NativeDecoder(model, rows=2, capacity=40)
    assert counted == []
    native.read([[1, 2, 3], [4, 5, 6, 7]])
    native.step(torch.tensor([1, 2]))
    native.read([[1], [2]])
    assert counted == [(model, 36)]
    NativeDecoder(model, capacity=40, precision="int8").read([[1]])  # has a copy of the weights
    assert len(counted) == 1


@pytest.mark.parametrize("threads", [1, 2, 3])
@torch.no_grad()
def test_more_activations_than_a_cache_holds(threads):
    """18 MB of hidden units: a chunk of the last matmul has several panels, and its last panel is a part of one."""
    config = decoder(d_model=600, n_heads=2, n_layers=1, feedforward=c.Dense(60_000), max_len=80)
    model = build(config, seed=0).eval()
    prompt = tokens(1, 75, vocab=config.vocab_size)
    native = NativeDecoder(model, rows=1, capacity=80, threads=threads)
    assert relative(native.read([prompt[0].tolist()])[0], model(prompt)[0, -1]) < 3e-5


@pytest.mark.parametrize("window", [None, 9, 40])
@pytest.mark.parametrize("name", [name for name in KNOWN if name != "rotary-long"])  # its divisors are for narrow heads
@torch.no_grad()
def test_heads_wide_enough_for_panels_see_what_narrow_ones_see(name, window):
    """Values 32 wide take the way of blocks and panels; groups of heads, windows and positions included."""
    config = decoder(d_model=64, n_heads=2, n_kv_heads=1, d_head=32, position=KNOWN[name], window=window, max_len=128)
    model = float_model(config)
    prompt = tokens(1, 100)
    native = NativeDecoder(model, rows=1, capacity=120)
    assert relative(native.read([prompt[0].tolist()]), model(prompt)[:, -1]) < 3e-5
    assert relative(native.step(torch.tensor([3])), model(torch.cat([prompt, torch.tensor([[3]])], 1))[:, -1]) < 3e-5


needs_halves = pytest.mark.skipif(
    cxx.compiler() is None or not library.load().glass_has_halves(), reason="this processor does not convert float16"
)


@pytest.mark.sample(3)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("heads", "shared"), [(18, 2), (5, 1), (3, 3), (7, 1)])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@torch.no_grad()
def test_heads_that_share_keys_read_them_together(heads, shared, threads, precision):
    """In groups of eight, and of those by fours, twos and ones; over several blocks of keys, the last one not full."""
    attention = {"n_heads": heads, "n_kv_heads": shared, "d_head": 16}
    config = decoder(d_model=48, attention=c.Attention(**attention), head=c.Head(tied=False), max_len=400)
    model = float_model(config, std=0.2)
    native = NativeDecoder(model, rows=2, capacity=300, precision=precision, threads=threads)
    native.read([tokens(1, 280, seed=row)[0].tolist() for row in range(2)], chunk=8)
    found = native.step(torch.tensor([3, 4]))
    round_matrices(model, precision) if precision != "float32" else None
    for row in range(2):
        ids = torch.cat([tokens(1, 280, seed=row), torch.tensor([[3 + row]])], 1)
        wanted = model(ids, tap=HalfCache() if native.halves else NO_TAP)[0, -1]
        assert relative(found[row], wanted) < (2e-4 if native.halves else 2e-5)


@needs_halves
@torch.no_grad()
def test_lower_precisions_keep_keys_and_values_in_float16():
    """Numbers beyond the largest of float16 become that one: they would be infinite, and then NaN."""
    model = float_model(decoder(d_model=64, n_heads=2, d_head=32, d_ff=64, max_len=32), std=0.2)
    for block in model.decoder.blocks:
        block.attention.v.weight.mul_(1e6)
        block.attention.k.weight.mul_(3e5)
    ids = tokens(1, 30)
    for precision, dtype in (("float32", torch.float32), ("bfloat16", torch.float16), ("int4", torch.float16)):
        native = NativeDecoder(model, 1, 32, precision)
        logits = native.read([ids[0].tolist()])
        assert native.keys.dtype is native.values.dtype is dtype
        assert logits.isfinite().all()
        largest = float(native.values[..., :30, :].abs().max())
        assert largest == 65504 if dtype is torch.float16 else largest > 65504
    narrow = float_model(decoder(d_model=64, n_heads=4, d_head=8, d_ff=64))
    assert NativeDecoder(narrow, 1, 32, "int8").keys.dtype is torch.float32


def test_most_variants_are_known():
    assert len(KNOWN) >= 6


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("window", [None, 5])
@torch.no_grad()
def test_every_known_position_scheme_with_and_without_a_window(name, window):
    model = float_model(decoder(position=KNOWN[name], window=window))
    ids = tokens(2, 20)
    assert relative(stepped(model, ids), model(ids)) < 2e-5


@pytest.mark.sample(2)
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8", "int4"])
def test_threads_and_batch_do_not_change_a_bit(precision):
    """A row of a product is summed by one thread, in one order, for any few vectors."""
    model = float_model(decoder(d_model=128, n_heads=4, d_ff=256))
    ids = tokens(13, 6)
    one = stepped(model, ids, precision=precision, threads=1)
    assert torch.equal(stepped(model, ids, precision=precision, threads=3), one)
    for rows in (1, 2, 3, 7):
        assert torch.equal(stepped(model, ids[4 : 4 + rows], precision=precision, threads=2), one[4 : 4 + rows])


@torch.no_grad()
def round_matrices(model, precision, bound=1.0):
    """The model that the kernels stand for: matrices rounded as they are packed, the rounding itself within bounds."""
    latent = model.config.attention.latent
    for name, weight in model.named_parameters():
        is_exact = name.startswith(("embed", "decoder.position")) or "router" in name or "shared_gate" in name
        if weight.dim() == 2 and not is_exact:
            if latent is not None and name.endswith("attention.k.weight"):  # transposed for each head
                heads = weight.unflatten(0, (model.config.n_heads, -1)).transpose(1, 2)
                weight.copy_(rounded(heads.flatten(0, 1), precision).view_as(heads).transpose(1, 2).flatten(0, 1))
                continue
            found = rounded(weight, precision)
            assert float((found - weight).abs().max()) <= bound * float(weight.abs().max())
            weight.copy_(found)


def rounded(weight, precision):
    kind = packed_as(weight.shape[1], precision)
    if kind == "bfloat16":
        return weight.bfloat16().float()
    whole, scales = quantise(weight, group_of(weight.shape[1], kind), kind)
    return (whole.float().unflatten(1, (scales.shape[1], -1)) * scales[..., None]).flatten(1)


# int8 rounds activations to 16 bits too, int4 to 8 where bytes can be multiplied (test_kernels.py bounds one product);
# layers carry that on
@pytest.mark.parametrize("sizes", [(128, 384), (80, 200)])
@pytest.mark.parametrize(
    ("precision", "bound", "close"), [("bfloat16", 2**-8, 2e-5), ("int8", 1 / 127, 5e-4), ("int4", 1 / 7, 5e-2)]
)
@torch.no_grad()
def test_lower_precisions_equal_the_engine_with_the_same_rounded_weights(precision, bound, close, sizes):
    """Not "close to float32" but exactly what rounding the matrices means; the rounding itself is bounded too."""
    model = float_model(decoder(d_model=sizes[0], n_heads=4, d_ff=sizes[1], head=c.Head(tied=False)))
    ids = tokens(2, 10)
    found = stepped(model, ids, precision=precision)
    round_matrices(model, precision, bound)
    assert relative(found, model(ids)) < close  # heads are too narrow for a cache in float16


# Of 16 tokens and more at once the activations are rounded too: to bfloat16, or to 8 bits of the largest of 64 to 256
# columns; read 8 at a time they are not, or to 16 bits. A mistake of layout or scale would be as large as the logits.
@pytest.mark.sample(6)
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("name", ["rotary-halves", "alibi", "learned"])
@pytest.mark.parametrize(
    ("precision", "at_once", "in_small_parts"), [("bfloat16", 2e-2, 2e-4), ("int8", 5e-2, 5e-4), ("int4", 5e-2, 5e-2)]
)
@torch.no_grad()
def test_prompts_in_lower_precisions_are_near_the_engine_with_the_same_rounded_weights(
    precision, at_once, in_small_parts, name, window
):
    """Groups of heads, windows, rows of unequal length, a chunk that cuts them, and the steps after."""
    config = decoder(
        d_model=128, n_heads=4, n_kv_heads=2, d_head=32, d_ff=320, position=KNOWN[name], window=window, max_len=128,
        head=c.Head(tied=False),
    )  # fmt: skip
    model = float_model(config, std=0.1)
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (50, 3, 37)]
    found = {}
    for chunk in (64, 8):
        native = NativeDecoder(model, rows=3, capacity=64, precision=precision)
        found[chunk] = native.read(prompts, chunk), native.step(torch.tensor([1, 2, 3]))
    round_matrices(model, precision)
    for row, prompt in enumerate(prompts):
        tap = HalfCache() if native.halves else NO_TAP
        wanted = model(torch.tensor([[*prompt, row + 1]]), tap=tap)[0, -2:]
        for chunk, close in ((64, at_once), (8, in_small_parts)):
            assert relative(torch.stack([logits[row] for logits in found[chunk]]), wanted) < close


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
@torch.no_grad()
def test_a_batch_of_many_rows_steps_as_each_alone(precision):
    """16 rows and more take the way of prompts, each at a place of its own."""
    model = float_model(decoder(d_model=64, n_heads=2, d_head=32, d_ff=128), std=0.1)
    prompts = [tokens(1, 1 + n % 7, seed=n)[0].tolist() for n in range(19)]
    native = NativeDecoder(model, rows=19, capacity=16, precision=precision)
    native.read(prompts)
    found = native.step(torch.arange(19))
    round_matrices(model, precision) if precision != "float32" else None
    for row, prompt in enumerate(prompts):
        wanted = model(torch.tensor([[*prompt, row]]))[0, -1]
        assert relative(found[row], wanted) < {"float32": 2e-5, "bfloat16": 2e-2, "int8": 5e-2}[precision]


@torch.no_grad()
def test_a_changed_weight_is_seen_in_every_precision():
    model = float_model(decoder(d_model=64, n_heads=4))
    ids = tokens(1, 4)
    for precision in ("float32", "bfloat16", "int8", "int4"):
        before = stepped(model, ids, precision=precision)
        model.blocks[0].attention.v.weight.data[:2] = model.blocks[0].attention.v.weight.data[[1, 0]]  # behind its back
        after = stepped(model, ids, precision=precision)
        assert relative(after, before) > 1e-4, precision


MIXTURES = {
    "softmax": c.MoE(5, 2, c.Gated(96)),
    "shared": c.MoE(5, 3, c.Dense(64), normalize=False, shared=c.Gated(160, bias=True), shared_gate=True),
    "groups": c.MoE(
        8, 3, c.Gated(64, limit=0.7, up_offset=1.0), shared=c.Dense(64),
        router=c.Router("sigmoid", bias=True, scale=2.5, correction=True, groups=4, top_groups=2),
    ),
}  # fmt: skip


def mixture(feedforward, **changes):
    """Layers of experts around a dense one."""
    config = decoder(d_model=128, n_heads=4, n_layers=3, feedforward=feedforward, max_len=128, **changes)
    dense = c.LayerKind((1,), feedforward=c.Dense(192))
    return float_model(c.replace(config, layer_kinds=(dense,)), std=0.1)


@pytest.mark.parametrize("name", MIXTURES)
@torch.no_grad()
def test_experts_compute_prompts_and_steps_as_the_engine_does(name):
    """Runs of one vector, of a few and of many; more threads than experts have tokens."""
    model = mixture(MIXTURES[name])
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (100, 1, 23)]
    native = NativeDecoder(model, rows=3, capacity=128, threads=7)
    found, after = native.read(prompts), native.step(torch.tensor([1, 2, 3]))
    for row, prompt in enumerate(prompts):
        wanted = model(torch.tensor([[*prompt, row + 1]]))[0]
        assert relative(found[row], wanted[-2]) < 3e-5
        assert relative(after[row], wanted[-1]) < 3e-5


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize(("precision", "close"), [("bfloat16", 2e-5), ("int8", 5e-4), ("int4", 5e-2)])
@torch.no_grad()
def test_experts_in_lower_precisions_equal_the_engine_with_the_same_rounded_weights(name, precision, close):
    """The router is not rounded. The median token: int4 rounds activations to 8 bits, and a few take another expert."""
    model, ids = mixture(MIXTURES[name], head=c.Head(tied=False)), tokens(2, 10)
    found = stepped(model, ids, precision=precision)
    for threads in (1, 5):
        assert torch.equal(stepped(model, ids, precision=precision, threads=threads), found)
        assert torch.equal(stepped(model, ids[1:], precision=precision, threads=threads), found[1:])
    round_matrices(model, precision)
    wanted = model(ids)
    errors = (found - wanted).abs().amax(-1) / wanted.abs().max()
    assert errors.median() < close
    assert precision == "int4" or errors.max() < close


@torch.no_grad()
def test_equal_scores_choose_the_experts_and_groups_that_the_engine_chooses():
    model, ids = mixture(MIXTURES["groups"]), tokens(2, 40)
    for module in model.modules():
        if isinstance(module, Router):
            for held in (module.weight, module.bias, module.correction):
                held.zero_()
    native = NativeDecoder(model, rows=2, capacity=64)
    assert relative(native.read(ids.tolist()), model(ids)[:, -1]) < 3e-5


@torch.no_grad()
def test_a_changed_correction_of_a_router_is_seen():
    model, ids = mixture(MIXTURES["groups"]).bfloat16(), tokens(1, 6)
    before = stepped(model, ids)
    for module in model.modules():
        if isinstance(module, Router):
            module.correction.copy_(torch.linspace(0, 4, 8))
    assert relative(stepped(model, ids), before) > 1e-3


@torch.no_grad()
def test_scores_that_are_nan_give_nan():
    model = mixture(MIXTURES["softmax"])
    model.blocks[0].feedforward.router.weight[2] = float("nan")
    native = NativeDecoder(model, rows=2, capacity=64)
    assert native.read([list(range(30)), [1]]).isnan().all()
    assert native.step(torch.tensor([1, 2])).isnan().all()


@pytest.mark.parametrize("kept", [0, 5, 6])
@torch.no_grad()
def test_prompts_in_bfloat16_after_any_number_of_tokens(kept):
    """Several blocks of queries, whose last keys are the first or the second numbers of pairs; scores of both signs."""
    model = float_model(decoder(d_model=64, n_heads=2, d_head=32, n_layers=1, max_len=96, head=c.Head(tied=False)))
    ids = tokens(1, 90)
    native = NativeDecoder(model, 1, 96, "bfloat16")
    if kept:
        native.read([ids[0, :kept].tolist()])
    found = native.extend(0, kept, ids[0, kept:].tolist(), 90 - kept)
    round_matrices(model, "bfloat16")
    assert relative(found, model(ids)[0, kept:]) < 2e-2


def latent(n_heads=8, **changes):
    """Latent attention with vectors wide enough for panels, and experts around a dense feed-forward."""
    attention = c.Attention(
        n_heads=n_heads, d_head=72, d_value=20, latent=c.Latent(kv_rank=64, d_shared=8, **changes), bias=False
    )
    return mixture(MIXTURES["groups"], attention=attention, position=c.Rotary(fraction=1 / 9), head=c.Head(tied=False))


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("q_rank", [None, 48])
@torch.no_grad()
def test_latent_attention_computes_prompts_and_steps_as_the_engine_does(q_rank, threads):
    """Rows of one token and of many; heads together (four of one thread or more) and one by one."""
    model = latent(q_rank=q_rank)
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (100, 1, 23)]
    native = NativeDecoder(model, rows=3, capacity=128, threads=threads)
    found, after = native.read(prompts, 64), native.step(torch.tensor([1, 2, 3]))
    assert native.keys.shape == (3, 3, 1, 128, 8 + 64)
    assert native.values.numel() == 0
    for row, prompt in enumerate(prompts):
        wanted = model(torch.tensor([[*prompt, row + 1]]))[0]
        assert relative(found[row], wanted[-2]) < 3e-5
        assert relative(after[row], wanted[-1]) < 3e-5
    native.reorder(torch.tensor([2, 0]))
    found = native.step(torch.tensor([5, 6]))
    for row, parent in enumerate((2, 0)):
        wanted = model(torch.tensor([[*prompts[parent], parent + 1, row + 5]]))[0, -1]
        assert relative(found[row], wanted) < 3e-5


@pytest.mark.sample(2)
@pytest.mark.parametrize(("precision", "close"), [("bfloat16", 2e-5), ("int8", 5e-4), ("int4", 5e-2)])
@torch.no_grad()
def test_latent_attention_in_lower_precisions_equals_the_engine_with_the_same_rounded_weights(precision, close):
    """The matrix that is absorbed is rounded transposed, head by head. The median token, because of the experts."""
    model, ids = latent(), tokens(2, 24)
    found = stepped(model, ids, precision=precision)
    assert torch.equal(stepped(model, ids, precision=precision, threads=1), found)
    assert torch.equal(stepped(model, ids[1:], precision=precision), found[1:])
    native = NativeDecoder(model, rows=2, capacity=24, precision=precision)
    read = native.read(ids.tolist())
    round_matrices(model, precision)
    wanted = model(ids)
    errors = (found - wanted).abs().amax(-1) / wanted.abs().max()
    assert errors.median() < close
    assert precision == "int4" or errors.max() < close
    assert relative(read, wanted[:, -1]) < 0.1


@torch.no_grad()
def test_prompts_of_latent_attention_in_bfloat16():
    """Keys of 16 + 32 numbers, which fit pairs of bf16, for an even and an odd number of tokens."""
    attention = c.Attention(n_heads=4, d_head=48, d_value=20, latent=c.Latent(kv_rank=32, d_shared=16), bias=False)
    config = decoder(d_model=64, attention=attention, position=c.Rotary(fraction=1 / 3), head=c.Head(tied=False))
    model = float_model(c.replace(config, max_len=80), std=0.1)
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (64, 41, 16)]
    found = NativeDecoder(model, rows=3, capacity=80, precision="bfloat16").read(prompts)
    round_matrices(model, "bfloat16")
    for row, prompt in enumerate(prompts):
        assert relative(found[row], model(torch.tensor([prompt]))[0, -1]) < 2e-2


@torch.no_grad()
def test_a_changed_weight_of_latent_attention_is_seen_in_float32_too():
    model, ids = latent(), tokens(1, 4)
    before = stepped(model, ids)
    for part in ("k", "v", "kv_down"):
        getattr(model.blocks[0].attention, part).weight.data[:2] += 1
        after = stepped(model, ids)
        assert relative(after, before) > 1e-4, part
        assert relative(after, model(ids)) < 3e-5, part
        before = after


LONG = c.Rotary(scaling=c.LongScaling(*variants.LONG, original_max_len=30, attention_factor=1.2))


@torch.no_grad()
def test_prompts_longer_than_a_limit_have_other_frequencies_next_to_shorter_ones():
    """In layers with that position and in others; sequences are exchanged; none grows across the limit."""
    kinds = (c.LayerKind((0,), position=c.Rotary(base=50.0)),)
    model = float_model(decoder(position=LONG, layer_kinds=kinds, n_layers=3, max_len=80))
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (28, 31, 29, 60)]
    native = NativeDecoder(model, rows=4, capacity=64)
    read, after = native.read(prompts, 16), native.step(torch.arange(4))
    native.reorder(torch.tensor([1, 3, 0]))
    found = native.step(torch.tensor([4, 5, 6]))
    for row, prompt in enumerate(prompts):
        assert relative(read[row], model(torch.tensor([prompt]))[0, -1]) < 3e-5
        assert relative(after[row], model(torch.tensor([[*prompt, row]]))[0, -1]) < 3e-5
    for row, parent in enumerate((1, 3, 0)):
        wanted = model(torch.tensor([[*prompts[parent], parent, row + 4]]))[0, -1]
        assert relative(found[row], wanted) < 3e-5
    with pytest.raises(NativeError, match="a sequence of 30 tokens would grow beyond 30"):
        native.step(torch.tensor([1, 2, 3]))
    logits = native.extend(2, 0, prompts[3], 5)
    assert relative(logits, model(torch.tensor([prompts[3]]))[0, -5:]) < 3e-5


def test_a_full_cache_and_wrong_settings_are_sentences():
    model = float_model(decoder())
    native = NativeDecoder(model, capacity=2)
    for _ in range(2):
        native.step(torch.tensor([1]))
    with pytest.raises(NativeError, match="holds 2 tokens and is full"):
        native.step(torch.tensor([1]))
    with pytest.raises(NativeError, match=r"shape \(2,\): give one for each of 1 rows"):
        native.step(torch.tensor([1, 2]))
    with pytest.raises(NativeError, match="use float32, bfloat16, int8, int4"):
        NativeDecoder(model, precision="int3")


def test_reordered_rows_go_on_from_their_parents():
    model = float_model(decoder())
    ids = tokens(3, 5)
    native = NativeDecoder(model, rows=3, capacity=8)
    for t in range(4):
        native.step(ids[:, t])
    native.reorder(torch.tensor([2, 0, 0, 1]))
    found = native.step(ids[:, 4][[2, 0, 0, 1]])
    with torch.no_grad():
        assert relative(found, model(ids)[[2, 0, 0, 1], -1]) < 2e-5


def test_small_models_decode_in_one_thread_and_others_in_as_many_as_torch():
    model = float_model(decoder())
    assert NativeDecoder(model).threads == NativeDecoder(model, rows=4).threads == 1
    assert NativeDecoder(model, rows=5).threads == torch.get_num_threads()
    assert NativeDecoder(model, threads=3).threads == 3
    assert default_threads(build(presets.gpt2(n_layers=1), device="meta"), 1) == torch.get_num_threads()


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8", "int4"])
def test_tokens_of_a_prompt_of_any_length_have_the_logits_of_a_longer_one(precision):
    """The last tile of a prompt computes the vectors that exist, whatever their number."""
    model = float_model(decoder(d_model=64, n_heads=4, feedforward=c.Dense(128), max_len=64))
    ids = torch.randint(model.config.vocab_size, (56,), generator=torch.Generator().manual_seed(0)).tolist()
    native = NativeDecoder(model, 1, 64, precision)
    wanted = native.extend(0, 0, ids, len(ids))  # four tiles of 14, or 28 of 2
    many = 48 if precision == "float32" or cxx.register_bits() < 512 else 16  # as is_many in operands.h
    for n in range(many, 57):
        assert relative(native.extend(0, 0, ids[:n], n), wanted[:n]) < 1e-6
