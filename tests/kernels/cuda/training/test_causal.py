"""Causal attention and its gradient: the definition against autograd, the CUDA kernels on a CPU against that."""

import ctypes
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from glassformer import config as c
from glassformer.kernels.cuda.training import causal, projections
from glassformer.kernels.replacement import replace_modules
from glassformer.kernels.toolchain import nvrtc
from glassformer.training.objective import Batch, summed_loss
from glassformer.training.run import Loss
from tests.emulated_cuda import built, needs_compiler
from tests.variants import decoder, lively

BF = torch.bfloat16


class Matrix(ctypes.Structure):
    """What emulated_hopper.h reads from a Map."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("numbers", "rows", "columns", "step", "box")]


def emulated_map(matrix, box):
    made = nvrtc.Map()
    held = Matrix(matrix.data_ptr(), *matrix.shape, matrix.stride(0), box)
    ctypes.memmove(ctypes.byref(made), ctypes.byref(held), ctypes.sizeof(held))
    return made


def numbers(B, T, H, K, sliced, dtype=BF):
    """Queries, keys and values (B,T,HK); `sliced`: as parts of wider rows."""
    generator = torch.Generator().manual_seed(T + H)
    given = torch.randn(B, T, 3 * H * K, generator=generator).to(dtype)
    return [t if sliced else t.contiguous() for t in given.chunk(3, -1)]


def by_head(qkv, heads):
    return [t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in qkv]


def test_the_definition_is_attention_and_its_gradient():
    given = [t.requires_grad_() for t in numbers(2, 9, 3, 5, False, torch.float64)]
    d_out = torch.randn(2, 9, 15, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wanted = F.scaled_dot_product_attention(*by_head(given, 3), is_causal=True, scale=0.3).transpose(1, 2).flatten(2)
    found = causal._Causal.apply(3, 0.3, *given)
    assert torch.allclose(wanted, found, rtol=1e-12)
    for a, b in zip(torch.autograd.grad(wanted, given, d_out), torch.autograd.grad(found, given, d_out), strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def test_heads_that_share_keys_and_values():
    """Their gradients are the sums of those of repeated heads."""
    q, k, v = (t.requires_grad_() for t in numbers(2, 9, 6, 5, False, torch.float64))
    k, v = (t[..., :10].detach().clone().requires_grad_() for t in (k, v))
    d_out = torch.randn(2, 9, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    heads = [t.unflatten(-1, (-1, 5)).transpose(1, 2) for t in (q, k, v)]
    wanted = F.scaled_dot_product_attention(*heads, is_causal=True, scale=0.3, enable_gqa=True).transpose(1, 2)
    found = causal._Causal.apply(6, 0.3, q, k, v)
    assert torch.allclose(wanted.flatten(2), found, rtol=1e-12)
    given = (q, k, v)
    exact = torch.autograd.grad(wanted.flatten(2), given, d_out)
    for a, b in zip(exact, torch.autograd.grad(found, given, d_out), strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("sliced", [True, False])
def test_operators_keep_torchs_rules(sliced):
    given = numbers(2, 8, 2, 4, sliced)
    out, logs = causal.forward(given, 2, 0.5)
    torch.library.opcheck(causal.forward, (given, 2, 0.5))
    torch.library.opcheck(causal.backward, (given, out, logs, torch.ones_like(out), 2, 0.5))


def run(given, d_out, heads, scale, blocks, parts=1, parts_of_rows=False):
    """The kernels, as the operator launches them; the last heads in parts, one for each block."""
    out, logs = causal.forward(given, heads, scale)
    B, T, _ = out.shape
    nothing = float("nan")
    d = torch.full((3, *out.shape), nothing, dtype=out.dtype)
    if parts_of_rows:
        d = torch.full((B, T, 3, out.shape[2]), nothing, dtype=out.dtype).movedim(2, 0)
    bits, means = torch.full((2, B * heads, T), nothing)
    whole = B * heads - (blocks // parts if parts > 1 else 0)
    split = B * heads - whole
    sums = torch.full((split * parts + (blocks if whole else 0), T, causal.WIDTH), nothing)
    places = {"results": out, "d_results": d_out, "logs": logs, "bits": bits, "means": means, "sums": sums}
    argument = causal.Arguments(
        **{name: emulated_map(*of) for name, of in causal.matrices(given, d_out, d).items()},
        **{name: t.data_ptr() for name, t in places.items()},
        scale=scale,
        heads=heads,
        sharing=out.shape[2] // given[1].shape[2],
        time=T,
        count=B * heads,
        whole=whole,
        parts=parts,
    )
    made = built(causal.source(), "causal_backward", Path(__file__).parent, "find_means", "finish_queries")
    assert made.size() == ctypes.sizeof(causal.Arguments)
    made.run_find_means(ctypes.byref(argument), -(-B * heads * T // 32), 256)
    made.run(ctypes.byref(argument), blocks, causal.THREADS)
    if split:
        made.run_finish_queries(ctypes.byref(argument), split * T // causal.TILE, 256)
    return d, causal.backward(given, out, logs, d_out, heads, scale)


@pytest.mark.sample(1)
@needs_compiler
@pytest.mark.parametrize(
    ("batch", "time", "heads", "blocks", "sliced", "parts"),
    [
        (1, 128, 3, 2, True, 1),  # a head is a tile, and one of two blocks has two
        (2, 384, 2, 3, False, 1),  # queries go to and fro; one block has two heads
        (1, 256, 3, 2, True, 2),  # after a round of two, the third head is done by both blocks
        pytest.param(1, 640, 1, 2, False, 2, marks=pytest.mark.slow),  # parts have several blocks of keys
        pytest.param(1, 384, 3, 3, True, 3, marks=pytest.mark.slow),  # fewer heads than blocks before the parts
        pytest.param(1, 1024, 1, 1, True, 1, marks=pytest.mark.slow),
        pytest.param(1, 640, 5, 2, True, 1, marks=pytest.mark.slow),
    ],
)
def test_the_kernels_are_the_definition(batch, time, heads, blocks, sliced, parts):
    given = numbers(batch, time, heads, causal.WIDTH, sliced)
    d_out = torch.randn(batch, time, heads * causal.WIDTH, generator=torch.Generator().manual_seed(1)).to(BF)
    found, wanted = (t.double() for t in run(given, d_out, heads, 0.2, blocks, parts, parts_of_rows=sliced))
    # p and ds are rounded to 8 bits before they are multiplied, and so is the result: 2^-9 root mean square each
    parts = zip(found, wanted, strict=True)
    for a, b in parts:
        assert (a - b).norm() < 2**-7 * b.norm()
        rows = (a - b).flatten(0, 1).norm(dim=1) / b.flatten(0, 1).norm(dim=1).clamp(min=1e-2)
        assert rows.max() < 2**-5


@needs_compiler
def test_the_kernels_read_shared_keys():
    q, k, v = numbers(2, 128, 4, causal.WIDTH, True)
    given = [q, k[..., : 2 * causal.WIDTH], v[..., 64 : 64 + 2 * causal.WIDTH]]
    d_out = torch.randn(2, 128, 4 * causal.WIDTH, generator=torch.Generator().manual_seed(1)).to(BF)
    found, wanted = run(given, d_out, 4, 0.2, 3)
    for a, b in zip(found.double(), wanted.double(), strict=True):
        assert (a - b).norm() < 2**-7 * b.norm()


@pytest.mark.parametrize("shared", [1, 3])
def test_gradients_next_to_each_other(shared, monkeypatch):
    """As parts of one tensor they are those of the operator; gradients of shared keys and values are added."""
    q, k, v = numbers(2, 9, 6, 5, True, torch.float64)
    given = [q, k[..., : 30 // shared], v[..., : 30 // shared]]
    out, logs = causal.forward(given, 6, 0.3)
    d_out = torch.randn(2, 9, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def write(places, *of):
        for place, values in zip(places, causal.backward(*of), strict=True):
            place.copy_(values)

    monkeypatch.setattr(causal, "_backward_into", write)
    found = causal._side_by_side(given, out, logs, d_out, 6, 0.3)
    wanted = causal._shared(causal.backward(given, out, logs, d_out, 6, 0.3), given, 6)
    for a, b in zip(found, wanted, strict=True):
        assert torch.allclose(a, b, rtol=1e-12)
    whole = projections.side_by_side(found)
    assert whole.data_ptr() == found[0].data_ptr()  # no copy
    assert torch.equal(whole, torch.cat(found, -1))


@pytest.mark.sample(1)
@needs_compiler
@pytest.mark.parametrize("lazy", [0, 5, 9])
def test_warps_need_not_keep_step(lazy, monkeypatch):
    monkeypatch.setenv("EMULATED_ORDER", str(lazy))
    given, d_out = numbers(1, 384, 2, causal.WIDTH, True), torch.ones(1, 384, 2 * causal.WIDTH, dtype=BF)
    found, wanted = run(given, d_out, 2, 0.2, 1)
    assert (found.double() - wanted.double()).norm() < 2**-7 * wanted.double().norm()


@needs_compiler
def test_it_is_the_same_each_time_and_nan_stays_nan():
    given, d_out = numbers(1, 256, 1, causal.WIDTH, True), torch.ones(1, 256, causal.WIDTH, dtype=BF)
    (first, _), (second, _) = (run(given, d_out, 1, 0.2, 1) for _ in range(2))
    assert torch.equal(first, second)
    given[1][0, 200, 6] = float("nan")  # a key, which queries before it do not see
    found, wanted = run(given, d_out, 1, 0.2, 1)
    assert torch.equal(found.isnan().any(-1).any(0), wanted.isnan().any(-1).any(0))  # the gradients of a token


def test_rows_may_be_parts_of_longer_ones():
    whole = torch.zeros(2, 128, 3 * 64, dtype=BF)
    assert all(causal._rows(part).data_ptr() == part.data_ptr() for part in whole.chunk(3, -1))
    for apart in (whole[..., 1:65], whole.transpose(0, 1), whole[..., ::2]):
        taken = causal._rows(apart)
        assert torch.equal(taken, apart)
        assert taken.is_contiguous()
    assert causal._rows(whole[:, :64]).is_contiguous()  # a batch's rows end early


@given(st.integers(1, 300), st.integers(1, 16), st.integers(1, 140))
def test_every_block_of_keys_is_dealt_once_and_blocks_have_work(count, tiles, blocks):
    whole, parts, busy = causal.shares(count, tiles * causal.TILE, blocks)
    assert 0 <= whole <= count
    assert 1 <= parts <= tiles  # so that no part is without keys
    assert (parts == 1) == (whole == count)
    assert count / (blocks * -(-count // blocks)) <= busy + 1e-9 <= 1 + 2e-9  # no worse than whole heads
    dealt = [turn * parts + (parts - 1 - part if turn % 2 else part) for part in range(parts) for turn in range(tiles)]
    assert sorted(j for j in dealt if j < tiles) == list(range(tiles))  # the kernel's rule


def test_heads_that_would_leave_blocks_idle_are_done_in_parts():
    assert causal.shares(768, 1024, 132) == (768, 1, pytest.approx(768 / 792))
    assert causal.shares(192, 1024, 132)[:2] == (132, 2)
    # two parts of 60 heads, 18 of 36 tiles each and what sums cost, after a round of 36
    assert causal.shares(192, 1024, 132).busy == pytest.approx(192 * 36 / (132 * (36 + 18 + 4)))


def test_a_gpu_is_to_be_busy(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(causal, "available", lambda: True)
    monkeypatch.setattr(causal, "blocks", lambda: 132)
    assert causal.supports_call(64, 1024, 12, 64, gpu)  # GPT-2, 97 % busy
    assert causal.supports_call(12, 1024, 12, 64, gpu)  # 144 heads: a round, and 12 in parts
    assert not causal.supports_call(1, 1024, 12, 64, gpu)  # 12 heads
    assert causal.supports_call(6, 1024, 12, 64, gpu)  # 58 %, which is too little for longer ones
    assert not causal.supports_call(6, 2048, 12, 64, gpu)
    assert not any(causal.supports_call(64, T, 12, K, gpu) for T, K in ((1000, 64), (1024, 32), (4096, 64), (0, 64)))
    assert not causal.supports_call(64, 1024, 12, 64, torch.device("cpu"))


def test_a_compiler_asks_without_a_warning(monkeypatch, recwarn):
    monkeypatch.setattr(causal, "available", lambda: True)
    monkeypatch.setattr(causal, "blocks", lambda: 132)
    asked = torch.compile(
        lambda x: x + causal.supports_call(len(x), 1024, 12, 64, torch.device("cuda")), backend="eager", fullgraph=True
    )
    assert [float(asked(torch.zeros(batch))[0]) for batch in (1, 12)] == [0.0, 1.0]
    assert not recwarn.list


def install(model):
    replace_modules(causal.replacements(model))


def gradients(model):
    ids = torch.randint(0, model.config.vocab_size, (3, 12), generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    with torch.autocast("cpu", BF):
        total, _ = summed_loss(model.train(), Batch(ids[:, :-1], ids[:, 1:]), Loss(), True)
    total.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_a_model_trains_through_it(monkeypatch):
    model = lively(decoder(attention=c.Attention(n_heads=2)))[0].float()
    wanted, used = gradients(model), []
    install(model)
    monkeypatch.setattr(causal, "supports_call", lambda *sizes: used.append(sizes) or True)
    for name, found in gradients(model).items():
        if not name.endswith("attention.k.bias"):  # has no gradient but rounding
            assert (found - wanted[name]).norm() < 0.05 * wanted[name].norm(), name
    assert used == [(3, 11, 2, model.config.d_head, torch.device("cpu"))] * model.config.n_layers


def test_rotated_queries_and_keys_arrive_rotated(monkeypatch):
    model = lively(decoder(attention=c.Attention(n_heads=2, d_head=4), position=c.Rotary(), dropout=0.0))[0].float()
    wanted = gradients(model)
    install(model)
    monkeypatch.setattr(causal, "supports_call", lambda *sizes: True)
    for name, found in gradients(model).items():
        if not name.endswith("attention.k.bias"):
            assert (found - wanted[name]).norm() < 0.05 * wanted[name].norm(), name


def heads(*shape, dtype=BF):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


Q = heads(2, 4, 8, 16)
OTHERS = {
    "not causal": ((Q, Q, Q), {"is_causal": False}),
    "a mask": ((Q, Q, Q), {"is_causal": False, "attn_mask": torch.ones(8, 8, dtype=torch.bool)}),
    "dropout": ((Q, Q, Q), {"dropout_p": 1.0}),
    "wider values": ((Q, Q, heads(2, 4, 8, 24)), {}),
    "float32": ((Q.float(), Q.float(), Q.float()), {}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_it_is_used_for_nothing_that_it_does_not_compute(name, monkeypatch):
    monkeypatch.setattr(causal, "supports_call", lambda *sizes: True)
    monkeypatch.setattr(causal, "_Causal", None)
    qkv, changes = OTHERS[name]
    options = {"is_causal": True, "scale": 0.3} | changes
    assert torch.equal(causal.attend(*qkv, **options), F.scaled_dot_product_attention(*qkv, **options))
    if name == "not causal":
        with pytest.raises(AttributeError):  # so the cases above could have failed
            causal.attend(*qkv, is_causal=True, scale=0.3)
        with torch.no_grad():
            causal.attend(*qkv, is_causal=True, scale=0.3)  # an evaluation has no backward pass


@pytest.mark.parametrize(
    ("there", "cuda", "capability", "compiler", "wanted"),
    [
        (True, "13.0", (9, 0), True, True),
        (False, "13.0", (9, 0), True, False),
        (True, None, (9, 0), True, False),  # a GPU of another maker
        (True, "13.0", (8, 0), True, False),
        (True, "13.0", (10, 0), True, False),
        (True, "13.0", (9, 0), False, False),
    ],
)
def test_it_needs_a_hopper_gpu_and_a_compiler(there, cuda, capability, compiler, wanted, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(nvrtc, "is_available", lambda: compiler)
    assert causal.available() is wanted


@pytest.mark.gpu
@pytest.mark.skipif(not causal.available(), reason="no Hopper GPU with a compiler on this machine")
def test_on_a_gpu():
    from glassformer.bench.gpu.cuda_kernels import causal_attention_equals_its_definition

    assert all(finding.passed for finding in causal_attention_equals_its_definition())
