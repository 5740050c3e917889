"""Tensor parallelism: ranks that divide heads, hidden units, ids and positions. test_layouts.py compares whole runs."""

import copy

import pytest
import torch

import glassformer as gf
from glassformer.config import ConfigError
from glassformer.config.placement import cut_dimension
from glassformer.training import read_run, resume_session, train
from glassformer.training.distributed.exchange import Ranks
from glassformer.training.distributed.group import check
from glassformer.training.distributed.tensor import Division
from tests.training.distributed.ranks import alone, assert_same, curve, job, together
from tests.training.distributed.test_layouts import MODELS
from tests.training.distributed.threads import Threads, on_ranks
from tests.training.tiny import corpus


@pytest.mark.slow
@pytest.mark.parametrize("changes", [("machine.tensor=2",), ("machine.tensor=2", "machine.context=2")])
def test_ranks_write_the_files_of_one_process_which_resumes_them(tmp_path, changes):
    corpus(tmp_path)
    layout = ("machine.parallel=fsdp", *changes, "loop.keep=9")
    jobs = [job(tmp_path, f"{name}-t", *model, *layout) for name, model in MODELS.items()]
    assert together(tmp_path, 4, jobs) == [""] * len(jobs)
    for name, model in MODELS.items():
        expected = alone(tmp_path, name, *model, "loop.keep=9")
        found, wanted = (tmp_path / run / "checkpoints" / "step-00000000" for run in (f"{name}-t", name))
        assert (found / "model.safetensors").read_bytes() == (wanted / "model.safetensors").read_bytes()
        half = tmp_path / f"{name}-t" / "checkpoints" / "step-00000010"
        session = resume_session(str(half), (f'out="{tmp_path / name / "1"}"',))
        train(session.run, session.data, resume=session.resume)
        assert_same(curve(tmp_path / name / "1"), expected, first=11)


class Absent(Ranks):
    """One of several ranks without the others, whose tensors are taken to be its own."""

    def all_reduce(self, x, largest=False):
        return x

    def all_gather(self, x):
        return torch.stack([x] * self.size)

    def reduce_scatter(self, x):
        return x[self.rank]


def division(rank: int, size: int, vocab_size: int = 256) -> Division:
    return Division(Absent(None, rank, size), vocab_size)


def test_blocks_draw_other_numbers_on_each_rank_and_the_rest_the_same():
    inside, outside, dropped = [], [], []
    for rank in range(2):
        model = gf.build(gf.presets.gpt2(n_layers=2, n_heads=2, d_model=8, vocab_size=11, dropout=0.5), device="meta")
        division(rank, 2, 11).divide(model)
        model = model.to_empty(device="cpu").train()
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, 0.1)
        for block in model.decoder.blocks:
            block.norm_feedforward.register_forward_pre_hook(lambda *_: inside.append(float(torch.rand(()))))
        torch.manual_seed(0)
        model.decoder.dropout.register_forward_hook(lambda _, __, out: dropped.append(out == 0))
        model.encode(torch.zeros(3, 6, dtype=torch.long))
        outside.append(torch.rand(4))
    assert len(set(inside)) == 4
    assert torch.equal(*dropped)
    assert torch.equal(*outside)


@pytest.mark.parametrize("size", [2, 4])
def test_the_residual_stream_between_the_parts_has_a_share_of_the_positions(size):
    model = gf.build(gf.presets.llama_tiny(n_layers=2, n_kv_heads=4, vocab_size=11), device="meta")
    seen: list[tuple[int, int, tuple[int, ...]]] = []

    def run(ranks: Threads) -> torch.Tensor:
        own = copy.deepcopy(model)
        Division(ranks, 11).divide(own)
        own = own.to_empty(device="cpu")
        for parameter in own.parameters():
            torch.nn.init.ones_(parameter)
        for number, module in enumerate((own.decoder.blocks[0].norm_feedforward, own.decoder.norm)):
            module.register_forward_hook(lambda _, __, out, n=number: seen.append((ranks.rank, n, tuple(out.shape))))
        with torch.no_grad():
            return own.encode(torch.zeros(3, 9, dtype=torch.long))

    hidden = on_ranks(size, run)
    assert all(h.shape == (3, 9, 96) for h in hidden)
    positions = [9 * (rank + 1) // size - 9 * rank // size for rank in range(size)]
    assert sorted(seen) == [(rank, n, (3, positions[rank], 96)) for rank in range(size) for n in range(2)]


def test_every_parameter_is_cut_summed_or_seen_whole():
    model = gf.build(gf.presets.llama_tiny(head__tied=False), device="meta")
    cut = {name for name, _ in model.named_parameters() if cut_dimension(name) is not None}
    linear = (*(f"attention.{n}" for n in "qkvo"), *(f"feedforward.{n}" for n in ("gate", "up", "down")))
    blocks = {f"decoder.blocks.{layer}.{name}.weight" for layer in range(4) for name in linear}
    assert cut == blocks | {"embed.tokens.weight", "head.weight"}
    whole = dict(model.named_parameters())
    parts = [gf.build(gf.presets.llama_tiny(head__tied=False), device="meta") for _ in range(2)]
    divisions = [division(rank, 2) for rank in range(2)]
    for one, part in zip(divisions, parts, strict=True):
        one.divide(part)
        assert one.summed == whole.keys() - cut  # the norms, which see a share of the positions
    for name, parameter in whole.items():
        shapes = [tuple(part.get_parameter(name).shape) for part in parts]
        assert shapes[0] == shapes[1]
        assert divisions[0].whole_shape(name, shapes[0]) == tuple(parameter.shape)
    boxes = [division(rank, 2).part("decoder.blocks.0.attention.o.weight", (6, 8)) for rank in range(2)]
    values = torch.arange(48).view(6, 8)
    assert torch.equal(torch.cat([values[box] for box in boxes], dim=1), values)


def test_a_vocabulary_need_not_be_a_multiple_of_the_ranks():
    boxes = [division(rank, 3, 11).part("embed.tokens.weight", (11, 4))[0] for rank in range(3)]
    assert [box.stop - box.start for box in boxes] == [3, 4, 4]
    assert division(0, 3, 11).whole_shape("embed.tokens.weight", (3, 4)) == (11, 4)
    assert division(2, 3, 11).whole_shape("head.bias", (4,)) == (11,)


def test_experts_and_positions_are_not_summed_and_biases_are():
    experts = gf.build(gf.presets.moe_tiny(), device="meta")
    one = division(0, 2)
    one.divide(experts)
    assert not any("feedforward." in name and "norm" not in name for name in one.summed)
    gpt2 = gf.build(gf.presets.gpt2(n_layers=1), device="meta")
    one = division(0, 2, 50257)
    one.divide(gpt2)
    assert "decoder.position.weight" not in one.summed
    assert {f"decoder.blocks.0.{n}.bias" for n in ("attention.o", "feedforward.down", "norm_attention")} < one.summed


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (("machine.tensor=3",), "machine.tensor=3 does not divide 4 ranks"),
        (("model.n_heads=3", "model.d_model=24"), "does not divide the 3 heads"),
        (("model.preset=llama_tiny", "model.n_kv_heads=1"), "does not divide the 1 key/value heads"),
        (("model.d_ff=171",), "does not divide the 171 hidden units"),
        (("optim.kind=muon",), "the optimizer muon"),
        (("model.preset=t5_small", "loop.context=16"), "an encoder and a decoder"),
        (("model.preset=bloom_560m", "loop.context=16"), "biases on the scores"),
        (("machine.replicate=4",), "machine.replicate=4 x machine.tensor=2 does not divide 4 ranks"),
        (("machine.products=float8", "machine.precision=bfloat16"), "machine.products='float8'"),
        (("machine.parallel=ddp",), "needs machine.parallel='fsdp'"),
        (("loop.batch=7",), "is not a multiple of 2 ranks"),
    ],
)
def test_what_cannot_be_divided_is_refused_before_anything_is_built(monkeypatch, changes, words):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=words):
        check(read_run("", ("machine.parallel=fsdp", "machine.tensor=2", *changes)))
