"""Tensor parallelism: ranks that divide heads and hidden units compute what one process does."""

import pytest
import torch

import glassformer as gf
from glassformer.config import ConfigError
from glassformer.config.placement import cut_dimension
from glassformer.training import read_run, resume_session, train
from glassformer.training.distributed import tensor
from glassformer.training.distributed.group import check
from glassformer.training.distributed.tensor import Division
from tests.training.distributed.ranks import alone, assert_same, curve, job, together
from tests.training.tiny import corpus

MODELS = {
    "gpt2": ("model.n_heads=4", "model.d_model=32", "optim.ema=0.9", "optim.clip=0.1"),
    "llama": (
        *("model.preset=llama_tiny", "model.n_layers=2", "model.d_model=32", "model.n_heads=4", "model.n_kv_heads=4"),
        *("model.d_ff=48", "model.max_len=16", "model.attention.qk_norm={kind='rms_norm'}", "loop.accumulate=2"),
    ),
    "experts": ("model.preset=moe_tiny", "model.n_heads=4", "model.n_kv_heads=4", "loss.balance=0.0"),
    "encoder": (
        "model.preset=bert_base",
        "model.vocab_size=50",
        "model.n_heads=4",
        "model.dropout=0.0",
        "model.d_model=32",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "parts"), [(2, 2), (4, 2), (4, 4)])
def test_ranks_give_the_curve_and_the_files_of_one_process(tmp_path, ranks, parts):
    corpus(tmp_path)
    chosen = MODELS if ranks == 4 else {name: MODELS[name] for name in ("gpt2", "llama")}
    layout = ("machine.parallel=fsdp", f"machine.tensor={parts}", "loop.keep=9")
    jobs = [job(tmp_path, f"{name}-t", *changes, *layout) for name, changes in chosen.items()]
    assert together(tmp_path, ranks, jobs) == [""] * len(jobs)
    for name, changes in chosen.items():
        expected = alone(tmp_path, name, *changes, "loop.keep=9")
        assert_same(curve(tmp_path / f"{name}-t"), expected)
        found, wanted = (tmp_path / run / "checkpoints" / "step-00000000" for run in (f"{name}-t", name))
        assert (found / "model.safetensors").read_bytes() == (wanted / "model.safetensors").read_bytes()
        half = tmp_path / f"{name}-t" / "checkpoints" / "step-00000010"
        session = resume_session(str(half), (f'out="{tmp_path / name / "1"}"',))
        train(session.run, session.data, resume=session.resume)
        assert_same(curve(tmp_path / name / "1"), expected, first=11)


def division(rank: int, size: int) -> Division:
    return Division(None, rank, size)


def test_dropout_differs_between_ranks_inside_attention_only(monkeypatch):
    for name in ("_Copy", "_Sum"):  # the parts are not added up here
        monkeypatch.setattr(tensor, name, type(name, (), {"apply": staticmethod(lambda x, group: x)}))
    patterns, later = [], []
    for rank in range(2):
        model = gf.build(gf.presets.gpt2(n_layers=1, n_heads=2, d_model=8, dropout=0.5), device="meta")
        division(rank, 2).divide(model)
        model = model.to_empty(device="cpu").train()
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, 0.1)
        torch.manual_seed(0)
        with torch.no_grad():
            patterns.append(model.decoder.blocks[0].attention(torch.ones(4, 16, 8)))
        later.append(torch.rand(4))
    assert not torch.equal(*patterns)
    assert torch.equal(*later)


def test_every_parameter_of_a_block_is_cut_or_whole():
    model = gf.build(gf.presets.llama_tiny(), device="meta")
    cut = {name.split(".", 3)[-1] for name, _ in model.named_parameters() if cut_dimension(name) is not None}
    linear = (
        "attention.q",
        "attention.k",
        "attention.v",
        "attention.o",
        *(f"feedforward.{n}" for n in ("gate", "up", "down")),
    )
    assert cut == {f"{name}.weight" for name in linear}
    whole = dict(model.named_parameters())
    parts = [gf.build(gf.presets.llama_tiny(), device="meta") for _ in range(2)]
    for rank, part in enumerate(parts):
        division(rank, 2).divide(part)
    for name, parameter in whole.items():
        shapes = [tuple(part.get_parameter(name).shape) for part in parts]
        assert shapes[0] == shapes[1]
        assert division(0, 2).whole_shape(name, shapes[0]) == tuple(parameter.shape)
    boxes = [division(rank, 2).part("decoder.blocks.0.attention.o.weight", (6, 8)) for rank in range(2)]
    values = torch.arange(48).view(6, 8)
    assert torch.equal(torch.cat([values[box] for box in boxes], dim=1), values)


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
        (("machine.replicate=2",), "cannot be combined"),
        (("machine.parallel=ddp",), "needs machine.parallel='fsdp'"),
        (("loop.batch=7",), "is not a multiple of 2 ranks"),
    ],
)
def test_what_cannot_be_divided_is_refused_before_anything_is_built(monkeypatch, changes, words):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=words):
        check(read_run("", ("machine.parallel=fsdp", "machine.tensor=2", *changes)))
