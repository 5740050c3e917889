"""What the kernels read of a stack: packed weights and their mark, huge pages, and the tables of positions."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glassformer import config as c
from glassformer.kernels.cpu.decode import NativeDecoder, NativeEncoder
from glassformer.kernels.cpu.decode.stack import biases, fingerprint, settle, stretches, unsupported_config, weights_of
from glassformer.kernels.toolchain import cxx
from glassformer.model import build
from tests.kernels.cpu.decode.test_decoder import float_model
from tests.sampled import examples
from tests.variants import decoder, seq2seq

pytestmark = pytest.mark.skipif(cxx.compiler() is None, reason="no C++ compiler here")


def test_biases_depend_on_the_distance_alone_and_add_up():
    """Row h, column N - 1 + (key - query): the same numbers as torch's bias of any query."""
    for model in (build(seq2seq()), build(decoder(position=c.Alibi(), score_bias=c.T5Bias(buckets=8)))):
        for stack in (model.decoder, *([model.encoder] if hasattr(model, "encoder") else [])):
            table = biases(stack, 12)
            assert table.shape == (6, 12 if stack.causal else 23)
            places = torch.arange(12)[None]
            schemes = [s for s in (stack.position, stack.score_bias) if s is not None]
            with torch.no_grad():
                wanted = sum(scheme.bias(places, places, torch.float32) for scheme in schemes)[0]
            for query in range(12):
                seen = query + 1 if stack.causal else 12
                start = 11 - query
                assert torch.allclose(table[:, start : start + seen], wanted[:, query, :seen])
    assert biases(build(decoder()).decoder, 12) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"position": c.Alibi(rounded=True)},
        {
            "position": c.Rotary(scaling=c.LongScaling((1.0, 1.0), (2.0, 2.0), 9)),
            "layer_kinds": (c.LayerKind((1,), c.Rotary(scaling=c.LongScaling((1.0, 1.0), (2.0, 2.0), 8))),),
        },
    ],
)
def test_what_no_kernel_computes_is_refused(changes):
    assert unsupported_config(decoder(**changes)) is not None


def test_layers_that_share_a_block_share_its_packed_weights():
    weights = weights_of(float_model(decoder(d_model=64, n_heads=4, shared_blocks=(0, 0))), "int8")
    assert weights.layers[0].feed.up.weights == weights.layers[1].feed.up.weights
    apart = weights_of(float_model(decoder(d_model=64, n_heads=4)), "int8")
    assert apart.layers[0].feed.up.weights != apart.layers[1].feed.up.weights


def test_packing_happens_once_while_nothing_changes():
    model = float_model(decoder(d_model=64, n_heads=4))
    assert weights_of(model, "int8") is weights_of(model, "int8")
    mark = fingerprint(model)
    with torch.no_grad():
        model.head.weight.mul_(1) if model.head.weight is not None else model.embed.tokens.weight.mul_(1)
    assert fingerprint(model) == mark


@given(place=st.integers(0, 10**6), bit=st.integers(0, 31))
@settings(max_examples=examples(25))
def test_one_bit_of_one_weight_changes_the_mark_and_back_again(place, bit):
    model = marked_model()
    before, (index, at) = fingerprint(model), divmod(place, 7919)
    words = list(model.parameters())[index % len(list(model.parameters()))].data.view(-1).view(torch.int32)
    flipped = 1 << bit if bit < 31 else -(2**31)
    words[at % len(words)] ^= flipped
    assert fingerprint(model) != before
    words[at % len(words)] ^= flipped
    assert fingerprint(model) == before


def test_weights_that_change_places_change_the_mark():
    """Rows, columns, two numbers, opposite signs and whole matrices: a plain sum would see none of these."""
    model = marked_model()
    weight = model.blocks[0].feedforward.up.weight.data
    weight[:, :4] = torch.tensor([1.0, -1.0, 2.0, -2.0])
    seen = [fingerprint(model)]
    for order in (torch.arange(len(weight)).flip(0), torch.arange(len(weight)).roll(16)):
        weight.copy_(weight[order])
        seen.append(fingerprint(model))
    for swap in ([1, 0, 2, 3], [2, 1, 0, 3], [0, 3, 2, 1]):
        weight[:, :4] = weight[:, swap]
        seen.append(fingerprint(model))
    q, k = model.blocks[0].attention.q.weight.data, model.blocks[0].attention.k.weight.data
    kept = q.clone()
    q.copy_(k)
    k.copy_(kept)
    seen.append(fingerprint(model))
    assert len(set(seen)) == len(seen)


def test_the_mark_does_not_depend_on_the_number_of_threads():
    model, threads = marked_model(), torch.get_num_threads()
    marks = set()
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            marks.add(fingerprint(model))
    finally:
        torch.set_num_threads(threads)
    assert len(marks) == 1


def marked_model():
    """Sizes that are no multiples of what the mark reads at once, and one that it shares out."""
    return float_model(decoder(d_model=52, n_heads=4, n_kv_heads=4, d_ff=211, vocab_size=7001))


def test_weights_move_to_huge_pages_once_and_stay_what_they_are():
    model = float_model(decoder())
    before = {name: p.clone() for name, p in model.named_parameters()}
    assert [settle(model, n) for n in (150, 49, 1, 500)] == [False, False, True, False]
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert settle(float_model(decoder()), 1000)


def test_memory_that_lies_close_together_is_taken_as_one():
    """Two matrices side by side hold a huge page that neither holds alone; what lies far apart stays apart."""
    mega = 1 << 20
    pieces = [(9 * mega, 10 * mega), (0, mega), (mega + 64, 3 * mega), (3 * mega, 4 * mega), (5 * mega, 6 * mega)]
    assert stretches(pieces) == [(0, 4 * mega), (5 * mega, 6 * mega), (9 * mega, 10 * mega)]
    assert stretches([(0, 4 * mega), (mega, 2 * mega)]) == [(0, 4 * mega)]


KINDS = {
    "decoder": decoder(d_model=64, n_heads=4, max_len=64),
    "encoder": c.EncoderConfig(
        vocab_size=37, d_model=64, n_layers=2, attention=c.Attention(4), feedforward=c.Dense(64), max_len=16,
        embedding=c.Embedding(norm=True), placement="post",
    ),
    "encoder-decoder": seq2seq(),
}  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_any_weight_that_changes_is_packed_again(name, precision):
    """Also by `.data`, which no counter of torch sees. Only the weights that a stack reads are looked at each time."""
    model = float_model(KINDS[name])
    ids, target = [[3, 1, 4, 1, 5], [9, 2]], torch.tensor([7, 8])

    def computed(model):
        if name == "encoder":
            return torch.cat(NativeEncoder(model, precision).encode(ids))
        made = NativeDecoder(model, 2, 12, precision)
        return torch.cat([made.read(ids), made.step(target)])

    before = computed(model)
    assert torch.equal(computed(model), before)
    for parameter in model.parameters():
        parameter.data.mul_(-1.7)
        assert torch.equal(computed(model), computed(copy.deepcopy(model)))
