"""Sequences that ranks divide: losses and gradients of one process."""

import copy
import dataclasses

import pytest
import torch

import glassformer as gf
from glassformer.config import ConfigError, RMSNorm
from glassformer.training import read_run
from glassformer.training.blocks import recompute_blocks
from glassformer.training.distributed import context
from glassformer.training.distributed.context import ContextParallel
from glassformer.training.distributed.group import check
from glassformer.training.objective import IGNORED, Batch, summed_loss
from glassformer.training.run import Loss
from tests.training.distributed.threads import Threads, on_ranks

SIZES = {"n_layers": 2, "d_model": 16, "n_heads": 4, "d_ff": 16, "max_len": 32, "vocab_size": 29}
GROUPED = {**SIZES, "attention__n_kv_heads": 2}
MODELS = {
    "gpt2": lambda: gf.presets.gpt2(**SIZES, dropout=0.0),
    "llama": lambda: gf.presets.llama_tiny(**GROUPED, attention__qk_norm=RMSNorm()),
    "windows": lambda: gf.presets.llama_tiny(**GROUPED, attention__window=3, attention__window_layers=(1,)),
    "sinks": lambda: gf.presets.llama_tiny(**GROUPED, attention__sinks=True, attention__softcap=5.0),
    "encoder": lambda: gf.presets.bert_base(**SIZES, dropout=0.0),
}


def batch(length: int, packed: bool) -> Batch:
    ids = torch.randint(0, 29, (3, length + 1), generator=torch.Generator().manual_seed(0))
    targets = ids[:, 1:].contiguous()
    targets[1, :3] = IGNORED
    documents = torch.tensor([[0] * length, [0] * 4 + [1] * (length - 4), [0] * 5 + [1] * 2 + [2] * (length - 7)])
    return Batch(ids[:, :-1].contiguous(), targets, documents=documents if packed else None)


def compare(model: gf.DecoderLM, given: Batch, ranks: int, recompute: str = "no") -> None:
    """Assert that the parts of the ranks add up to the loss and the gradients of one process."""
    own = copy.deepcopy(model)
    total, plain = summed_loss(own, given, Loss(label_smoothing=0.1), True)
    total.backward()

    def divided(these: Threads):
        part = copy.deepcopy(model)
        recompute_blocks(part, recompute)
        parallel = ContextParallel(these)
        parallel.install(part)
        found = parallel.parted(summed_loss)(part, given, Loss(label_smoothing=0.1), True)
        found[0].backward()
        assert parallel.present is None
        return *(v.detach() for v in found), {name: p.grad for name, p in part.named_parameters()}

    found = on_ranks(ranks, divided)
    torch.testing.assert_close(torch.stack([t for t, *_ in found]).mean(), total.detach(), check_dtype=False)
    for _, own_plain, _ in found:
        torch.testing.assert_close(own_plain, plain.detach(), check_dtype=False)
    for name, parameter in own.named_parameters():
        if parameter.grad is not None:
            joined = torch.stack([gradients[name] for *_, gradients in found]).mean(0)
            torch.testing.assert_close(joined, parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_divided_sequences_have_the_losses_and_gradients_of_one_process(name, ranks):
    compare(gf.build(MODELS[name](), seed=0).double(), batch(12, packed=False), ranks)


@pytest.mark.parametrize("length", [12, 10])
@pytest.mark.parametrize("name", ["gpt2", "llama", "windows", "sinks"])
def test_documents_and_lengths_that_do_not_divide_evenly(name, length):
    compare(gf.build(MODELS[name](), seed=0).double(), batch(length, packed=True), 2)


@pytest.mark.parametrize("name", ["llama", "encoder"])
def test_a_sequence_is_filled_up_to_a_multiple_of_the_chunks(name):
    compare(gf.build(MODELS[name](), seed=0).double(), batch(11, packed=False), 2)


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_recomputed_blocks_gather_again(kind):
    compare(gf.build(MODELS["llama"](), seed=0).double(), batch(12, packed=False), 2, kind)


def test_each_rank_computes_the_same_number_of_scores(monkeypatch):
    """Chunks r and 2N - 1 - r: under a causal mask, all ranks have the same work."""
    counts: dict[int, int] = {}
    monkeypatch.setattr(context, "last_causal", lambda queries, keys, device: (queries, keys))

    def work(these: Threads) -> None:
        parallel = ContextParallel(these)
        q, k = torch.zeros(1, 1, 6, 2), torch.zeros(1, 1, 24, 2)

        def kernel(q, k, v, attn_mask, is_causal):
            assert (q.shape[2], k.shape[2], is_causal) == (*attn_mask, False)
            counts[these.rank] = counts.get(these.rank, 0) + q.shape[2] * k.shape[2]
            return q

        parallel._kernel(kernel, q, k, k, is_causal=True, attn_mask=None)

    on_ranks(4, work)
    assert set(counts.values()) == {3 * (3 + 24)}


def test_the_mask_that_a_gpu_does_not_write_out_is_the_one_of_the_cpu():
    from torch.nn.attention.bias import causal_lower_right

    written = context.last_causal(3, 7, torch.device("cpu"))
    assert torch.equal(causal_lower_right(3, 7)._materialize(torch.device("cpu")), written)


def test_outside_of_a_loss_whole_sequences_are_computed_as_usual():
    model = gf.build(MODELS["llama"](), seed=0)
    expected = model(batch(12, packed=False).inputs)
    ContextParallel(Threads(None, 0, 2)).install(model)
    assert torch.equal(model(batch(12, packed=False).inputs), expected)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (("machine.context=3",), "machine.context=3 does not divide 4 ranks"),
        (("machine.context=4", "machine.tensor=2"), "machine.tensor=2 x machine.context=4 does not divide 4 ranks"),
        (("loop.context=18",), r"loop.context=18 is not a multiple of 2 x machine.context=2.*Use 16 or 20"),
        (("model.preset=t5_small", "loop.context=16"), "an encoder and a decoder"),
        (("model.preset=bloom_560m", "loop.context=16"), "biases on the scores"),
        (("machine.parallel=ddp",), "machine.context needs machine.parallel='fsdp'"),
        (("loop.batch=7",), "is not a multiple of 2 ranks"),
    ],
)
def test_what_cannot_be_divided_is_refused_before_anything_is_built(monkeypatch, changes, words):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=words):
        check(read_run("", ("machine.parallel=fsdp", "machine.context=2", *changes)))


def test_frequencies_that_depend_on_the_length_are_refused():
    run = read_run("", ("machine.parallel=fsdp", "machine.context=2"))
    long = gf.config.LongScaling(short=(1.0, 1.0), long=(2.0, 2.0), original_max_len=16, attention_factor=1.0)
    position = gf.config.Rotary(scaling=long)
    model = dataclasses.replace(gf.presets.llama_tiny(**SIZES), position=position)
    with pytest.raises(ConfigError, match="LongRoPE"):
        context.check_context(dataclasses.replace(run, model=model))
