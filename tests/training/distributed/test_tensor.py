"""Tensor parallelism: ranks that divide heads, hidden units, ids and positions. test_layouts.py compares whole runs."""

import copy

import pytest
import torch

import glassformer as gf
from glassformer.config import ConfigError
from glassformer.config.placement import cut_dimension
from glassformer.training import read_run, resume_session, train
from glassformer.training.blocks import recompute_blocks
from glassformer.training.distributed.exchange import Ranks
from glassformer.training.distributed.group import check
from glassformer.training.distributed.tensor import Division
from glassformer.training.objective import Batch, summed_loss
from glassformer.training.optimizers import Optimizer, clear_held_rows
from glassformer.training.run import Loss, Optim
from glassformer.training.tuning.prepare import hold_padding
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


SIZES = {"n_layers": 2, "d_model": 16, "n_heads": 4, "max_len": 12, "vocab_size": 29}
DIVIDED = {
    "gpt2": lambda: gf.presets.gpt2(**SIZES, dropout=0.0),
    "llama": lambda: gf.presets.llama_tiny(**SIZES, n_kv_heads=2, d_ff=24, head__tied=False),
    "experts": lambda: gf.presets.moe_tiny(**SIZES, n_kv_heads=2),
    "windows": lambda: gf.presets.llama_tiny(
        **SIZES, n_kv_heads=2, d_ff=24, attention__window=3, attention__sinks=True
    ),
}


def part_of(model: gf.DecoderLM, ranks: Ranks) -> tuple[gf.DecoderLM, Division]:
    """Return what a rank has of a model, with its weights."""
    part, one = copy.deepcopy(model), Division(ranks, model.config.vocab_size)
    one.divide(part)
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            whole = model.get_parameter(name)
            parameter.copy_(whole[one.part(name, whole.shape) or ...])
    return part, one


@pytest.mark.parametrize("recompute", ["no", "full"])
@pytest.mark.parametrize("name", DIVIDED)
def test_divided_blocks_have_the_losses_and_gradients_of_one_process(name, recompute):
    model = gf.build(DIVIDED[name](), seed=0).double().train()
    ids = torch.randint(0, 29, (3, 12), generator=torch.Generator().manual_seed(0))
    given, loss = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()), Loss(label_smoothing=0.1, z_loss=1e-3)
    own = copy.deepcopy(model)
    expected = summed_loss(own, given, loss, True)
    expected[0].backward()

    def divided(ranks: Threads) -> None:
        part, one = part_of(model, ranks)
        recompute_blocks(part, recompute)
        found = summed_loss(part, given, loss, True)
        found[0].backward()
        gradients = [(n, p.grad) for n, p in part.named_parameters() if p.grad is not None]
        one.sum_gradients(gradients)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-6, atol=0.0, check_dtype=False)
        assert len(gradients) == len([p for p in own.parameters() if p.grad is not None])
        for name, gradient in gradients:
            whole = own.get_parameter(name).grad
            torch.testing.assert_close(gradient, whole[one.part(name, whole.shape) or ...], rtol=1e-4, atol=1e-6)

    on_ranks(2, divided)


def test_dropout_has_the_distribution_of_one_process():
    """Mean and covariance of what all positions compute, over many sequences of one token.

    Positions and heads of two ranks must be as independent as those of one: if ranks drew the same numbers, the
    covariance of their positions would be that of a position with itself.
    """
    sizes = {"n_layers": 2, "d_model": 8, "n_heads": 2, "max_len": 6, "vocab_size": 11}
    model = gf.build(gf.presets.gpt2(**sizes, dropout=0.4), seed=1).train()
    with torch.no_grad():
        model.decoder.position.weight.zero_()
        for parameter in model.decoder.blocks.parameters():
            parameter.mul_(8.0)  # branches that matter, compared with the embedding
    ids = torch.full((6000, 6), 3)

    def states(one: gf.DecoderLM) -> torch.Tensor:
        with torch.no_grad():
            return one.encode(ids).flatten(1)

    torch.manual_seed(5)
    expected = states(model)
    found, same = on_ranks(2, lambda ranks: states(part_of(model, ranks)[0]), seed=6)
    assert torch.equal(found, same)  # all ranks have all positions again
    spread = expected.std(0)
    assert (spread > 0.05).all()
    assert ((found.mean(0) - expected.mean(0)) / spread).abs().max() < 5 * (2 / len(ids)) ** 0.5
    ours, theirs = (torch.cov((x / spread).T) for x in (found, expected))
    assert (ours - theirs).abs().max() < 6 * (2 * 2 / len(ids)) ** 0.5


@pytest.mark.slow
def test_ranks_that_divide_blocks_learn_with_dropout_as_one_process_does(tmp_path):
    """Pairs of runs that differ in what dropout draws: the mean difference of losses is not larger than chance."""
    corpus(tmp_path)
    seeds = range(8)
    common = ("model.dropout=0.3", "model.n_heads=4", "model.d_model=32", "optim.lr=1e-3")
    layout = ("machine.parallel=fsdp", "machine.tensor=2")
    jobs = [job(tmp_path, f"{seed}-t", *common, *layout, f"seed={seed}") for seed in seeds]
    assert together(tmp_path, 2, jobs) == [""] * len(jobs)
    for steps in (range(1, 21), (-20,)):  # in training, and validation after it
        differences = torch.tensor([
            sum(curve(tmp_path / f"{seed}-t")[step] - one[step] for step in steps) / len(steps)
            for seed, one in ((seed, curves(tmp_path, seed, common)) for seed in seeds)
        ])  # fmt: skip
        assert differences.abs().max() > 1e-5  # other numbers were drawn
        assert differences.mean().abs() < 3.5 * differences.std() / len(seeds) ** 0.5


def curves(folder, seed: int, changes: tuple[str, ...]) -> dict[int, float]:
    """Return the losses of one process, which trains once for each seed."""
    done = (folder / f"{seed}" / "log.jsonl").exists()
    return curve(folder / f"{seed}") if done else alone(folder, f"{seed}", *changes, f"seed={seed}")


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


def test_rows_that_no_step_changes_are_those_of_the_whole_table():
    """Rows 4 and on of 11 tokens: rank 0 has rows 0 to 4, rank 1 the other six, all of which stay."""
    for rank, kept in ((0, 1), (1, 6)):
        model = gf.build(gf.presets.gpt2(n_layers=1, n_heads=2, d_model=8, vocab_size=11), device="meta")
        hold_padding(model, 4)
        division(rank, 2, 11).divide(model)
        model = model.to_empty(device="cpu")
        for parameter in model.parameters():
            torch.nn.init.ones_(parameter)
            parameter.grad = torch.ones_like(parameter)
        optimizer = Optimizer(model, Optim(lr=0.1, weight_decay=0.1))
        clear_held_rows(model.parameters())
        optimizer.step(1.0)
        table = model.embed.tokens.weight
        assert [bool((row == 1).all()) for row in table] == [False] * (len(table) - kept) + [True] * kept


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
