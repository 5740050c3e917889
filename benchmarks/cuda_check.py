"""The engine on a CUDA device against itself on the CPU. Needs torch alone, so it runs on a bare GPU image.

PYTHONPATH=src python benchmarks/cuda_check.py [NAME OF A CHECK ...]
"""

import dataclasses
import sys
from collections.abc import Iterator

import torch

from glassformer import presets
from glassformer.config import Alibi, ModelConfig, T5Bias, replace
from glassformer.finding import Finding
from glassformer.generate import Sampling, generate
from glassformer.model import build


def configs() -> dict[str, ModelConfig]:
    nano = presets.nano(n_layers=3, max_len=128)
    return {
        "learned": nano,
        "rotary, grouped": presets.llama_tiny(),
        "alibi": replace(nano, position=Alibi()),
        "t5 bias, window": replace(nano, position=T5Bias(), window=17),
        "experts": presets.moe_tiny(),
    }


def same_logits() -> Iterator[Finding]:
    for name, config in configs().items():
        on_cpu = build(config, seed=1, dtype=torch.float64)
        on_gpu = build(config, seed=1, dtype=torch.float64, device="cuda")
        tokens = torch.randint(0, config.vocab_size, (3, 50), generator=torch.Generator().manual_seed(0))
        mask = torch.arange(50)[None] >= torch.tensor([[0], [9], [49]])
        with torch.no_grad():
            difference = on_cpu(tokens, mask=mask) - on_gpu(tokens.cuda(), mask=mask.cuda()).cpu()
        yield Finding.judge(f"cuda = cpu: {name}", float(difference[mask].abs().max()), 1e-10, "float64 on both")


def same_generation() -> Iterator[Finding]:
    """Greedy, sampled (same uniform numbers on both devices), beams, and with drafts, in float64."""
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8]]
    for name, config in configs().items():
        models = [build(config, seed=1, dtype=torch.float64, device=device) for device in ("cpu", "cuda")]
        for how, settings in {
            "greedy": {},
            "sampled": {"sampling": Sampling(top_p=0.9)},
            "beams": {"beams": 3},
            "lookup": {"draft": "lookup"},
            "lookup, sampled": {"draft": "lookup", "sampling": Sampling(top_p=0.9)},
        }.items():
            a, b = (generate(model, prompts, 60, **settings) for model in models)
            wrong = sum(x != y for row, other in zip(a, b, strict=True) for x, y in zip(row, other, strict=True))
            yield Finding.judge(f"cuda = cpu, {how}: {name}", wrong, 0, "tokens that differ")


@torch.no_grad()
def graph_replay_equals_eager(steps: int = 40) -> Iterator[Finding]:
    """A decode step on a fixed static cache, captured once as a CUDA graph and replayed, against plain calls."""
    for name, config in configs().items():
        if name == "experts":
            continue  # its routing depends on data the host must see, so it cannot be captured
        model = build(config, seed=1, device="cuda").eval()
        prompt = torch.arange(1, 9, device="cuda")[None]
        cache = model.new_cache("static", capacity=64, fixed=True)
        token = model(prompt, cache=cache)[:, -1:].argmax(-1)
        expected, slot = generate(model, prompt.cpu(), steps + 1, cache=False).new[0], token.clone()
        got = [int(token)]
        for _ in range(3):  # warm-up steps outside the graph are ordinary decoding
            slot.copy_(model(slot, cache=cache)[:, -1:].argmax(-1))
            got.append(int(slot))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            slot.copy_(model(slot, cache=cache)[:, -1:].argmax(-1))
        while len(got) < steps + 1:
            graph.replay()
            got.append(int(slot))
        wrong = sum(a != b for a, b in zip(got, expected, strict=True))
        yield Finding.judge(f"graph replay = eager: {name}", wrong, 0, "tokens that differ")


def triton_loss_equals_plain() -> Iterator[Finding]:
    """The Triton chunk kernel against the plain one: loss and gradients, with and without smoothing and z-loss."""
    from glassformer.train import fused_loss, fused_loss_triton

    generator = torch.Generator("cuda").manual_seed(0)
    for columns in (50304, 50257, 31):
        logits = torch.randn(37, columns, generator=generator, device="cuda") * 4
        targets = torch.randint(0, columns, (37,), generator=generator, device="cuda")
        targets[5] = -100
        for smoothing, z_loss in ((0.0, 0.0), (0.1, 0.01)):
            plain = fused_loss.chunk_gradients(logits, targets, -100, smoothing, z_loss)
            fast = fused_loss_triton.chunk_gradients(logits.clone(), targets, -100, smoothing, z_loss)
            worst = max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(plain, fast, strict=True))
            yield Finding.judge(
                f"triton loss = plain: {columns}, {smoothing}, {z_loss}", worst, 1e-5, "float32, relative"
            )


def cuda_loss_equals_plain() -> Iterator[Finding]:
    """The CUDA chunk kernel, which takes bfloat16, against the plain one."""
    from glassformer.train import fused_loss, fused_loss_cuda

    generator = torch.Generator("cuda").manual_seed(0)
    for columns, stride in ((50304, 50304), (904, 904), (50257, 50304), (128255, 128256)):
        logits = (torch.randn(37, stride, generator=generator, device="cuda") * 4).bfloat16()
        targets = torch.randint(0, columns, (37,), generator=generator, device="cuda")
        targets[5] = -100
        for smoothing, z_loss in ((0.0, 0.0), (0.1, 0.01)):
            plain = fused_loss.chunk_gradients(logits, targets, -100, smoothing, z_loss, columns)
            fast = fused_loss_cuda.chunk_gradients(logits, targets, -100, smoothing, z_loss, columns)
            pairs = [(a.float(), b.float()) for a, b in zip(plain, fast, strict=True)]
            worst = max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)
            yield Finding.judge(f"CUDA loss = plain: {columns}, {smoothing}, {z_loss}", worst, 2**-8, "bfloat16's step")


def _apart(found: torch.Tensor, wanted: torch.Tensor) -> tuple[float, str]:
    """Of 8 bits, the share of numbers that are the neighbouring one (infinite if one is any other, or is NaN where it
    should not be), and such a number; of others, the relative difference."""
    found, a, b = found.cpu(), found.cpu().float(), wanted.float()
    seen = a.isnan() == b.isnan()
    if wanted.element_size() > 1:
        return float((a - b).nan_to_num(0).norm() / b.nan_to_num(0).norm()) if seen.all() else float("inf"), ""
    codes = (t.view(torch.uint8).short() for t in (found, wanted))
    steps = torch.sub(*(torch.where(c < 128, c, 128 - c) for c in codes)).abs()
    steps = torch.where(a.isnan() & seen, 0, torch.where(seen, steps, 1000))
    worst = int(steps.argmax())
    said = f", {float(a.flatten()[worst])} for {float(b.flatten()[worst])}" if steps.any() else ""
    return float("inf") if steps.max() > 1 else float((steps > 0).float().mean()), said


def _on_gpu(given: object) -> object:
    if isinstance(given, list):
        return [_on_gpu(t) for t in given]
    return given.cuda() if isinstance(given, torch.Tensor) else given


def float8_kernels_equal_their_definitions() -> Iterator[Finding]:
    """Every operator of 8-bit products on the GPU (CUDA, tensor cores) against its definition on the CPU."""
    from glassformer.train import fp8

    generator = torch.Generator().manual_seed(0)
    rows, columns, unit = 272, 1040, torch.tensor(0.25)
    x, d = (torch.randn(rows, columns, generator=generator).bfloat16() for _ in range(2))
    x[0, :5] = torch.tensor([float("nan"), float("inf"), 1e9, 1e-9, -float("inf")])
    finite, targets = x.nan_to_num(0, 0, 0).clamp(-9, 9), torch.arange(rows)
    targets[7] = -100
    a8, b8 = fp8.cast(finite, unit, fp8.E5M2)[0], fp8.cast(d, unit, fp8.E4M3)[0]
    long, few = 4 * torch.randn(32, 65536, generator=generator).bfloat16(), targets[:32].clone()
    kinds = ("relu", "relu2", "silu", "gelu_tanh", "gelu", "tanh")
    cases = [
        ("cast e4m3", fp8.cast, (x, unit, fp8.E4M3), 0.0),
        ("cast e5m2", fp8.cast, (x, unit, fp8.E5M2), 0.0),
        ("cast of several", fp8.cast_all, ([x, d, finite], unit, fp8.E5M2, True, None), 0.0),
        ("cast of several, filled up", fp8.cast_all, ([d, x[:201]], unit, fp8.E4M3, False, 512), 0.0),
        ("turn", fp8.turn, (a8,), 0.0),
        ("mean squares", fp8.mean_squares, ([finite, d.float()], False), 1e-5),
        ("mean squares of a sample", fp8.mean_squares, ([long, long[:31].float()], True), 1e-5),
        ("cast e4m3 of float32", fp8.cast, (x.float(), unit, fp8.E4M3), 0.0),
        ("cast e5m2 of float32", fp8.cast, (x.float(), unit, fp8.E5M2), 0.0),
        *((f"activate {kind}", fp8.activate, (x, unit, kind), 1e-3) for kind in kinds),
        *((f"backward {k}", fp8.activate_backward, (d, finite, unit, unit, k, k != "relu"), 1e-3) for k in kinds),
        *((f"backward {k}, not finite", fp8.activate_backward, (d, x, unit, unit, k, False), 1e-3) for k in kinds),
        ("product", fp8.product, (a8, b8, unit, unit, None, True), 5e-3),
        ("product with bias", fp8.product, (b8, b8, unit, unit, d[0, :rows].clone(), False), 5e-3),
        *((f"loss {s}", fp8.loss_gradients, (4 * finite, targets, -100, s, s / 10, 1031), 1e-3) for s in (0.0, 0.1)),
        ("loss of long rows", fp8.loss_gradients, (long, few, -100, 0.0, 0.0, 65500), 1e-3),
    ]
    for name, operator, given, limit in cases:
        on_gpu = operator(*(_on_gpu(t) for t in given))
        both = ((t,) if isinstance(t, torch.Tensor) else t for t in (on_gpu, operator(*given)))
        worst, said = max((_apart(a, b) for a, b in zip(*both, strict=True) if b.numel()), key=lambda pair: pair[0])
        yield Finding.judge(f"float8 on the GPU = its definition: {name}", worst, limit, f"share or relative{said}")


def float8_learns_as_bfloat16(steps: int = 60) -> Iterator[Finding]:
    """Blocks and head in 8 bits, compiled and captured, beside the same run in bf16."""
    from glassformer.train.graph import CapturedStep
    from glassformer.train.loop import prepare_state
    from glassformer.train.objective import Batch
    from glassformer.train.run import Loop, Machine, Optim, RunConfig, Schedule

    curves = []
    for products in ("precision", "float8"):
        run = RunConfig(
            model=presets.nano(vocab_size=5003),
            optim=Optim(lr=3e-3),
            schedule=Schedule(warmup=2),
            loop=Loop(steps=100, batch=8),
            machine=Machine(device="cuda", precision="bfloat16", compile="yes", products=products),
        )
        state = prepare_state(run)
        step, generator, losses = CapturedStep(state), torch.Generator().manual_seed(0), []
        for _ in range(steps):
            ids = (torch.rand(8, 65, generator=generator) ** 3 * 50).long()
            batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()).to(state.device)
            losses.append(float(step(state, batch)["loss"]))
        curves.append(losses)
    apart = abs(sum(curves[0][-10:]) - sum(curves[1][-10:])) / 10
    yield Finding.judge("float8 learns as bfloat16 does", apart, 0.05, "nats, mean of the last ten steps")
    yield Finding.within("float8 learns", curves[1][0] - curves[1][-1], 3.0, None, "nats lost in sixty steps")


def compiled_loss_has_the_plain_gradient() -> Iterator[Finding]:
    """Head and loss in chunks, compiled, against autograd through all logits: a gradient lost on the way shows here."""
    from torch.nn.functional import cross_entropy, linear

    from glassformer.train.fused_loss import linear_cross_entropy

    generator = torch.Generator("cuda").manual_seed(0)
    for columns in (65, 5000, 50304):
        hidden = torch.randn(300, 64, generator=generator, device="cuda", requires_grad=True)
        weight = torch.randn(columns, 64, generator=generator, device="cuda", requires_grad=True)
        targets = torch.randint(0, columns, (300,), generator=generator, device="cuda")
        plain = cross_entropy(linear(hidden, weight), targets, reduction="sum")
        wanted = torch.autograd.grad(plain, (hidden, weight))
        total, _ = torch.compile(linear_cross_entropy)(hidden, weight, targets)
        found = torch.autograd.grad(total, (hidden, weight))
        worst = max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(wanted, found, strict=True))
        yield Finding.judge(f"compiled loss = plain: {columns}", worst, 1e-3, "float32 (TF32 products), relative")


def captured_step_equals_eager(steps: int = 12) -> Iterator[Finding]:
    """Twelve steps as one CUDA graph against twelve ordinary ones; then a poisoned batch must change nothing."""
    from glassformer.train.graph import CapturedStep
    from glassformer.train.health import NonFinite
    from glassformer.train.loop import prepare_state, train_step
    from glassformer.train.objective import Batch
    from glassformer.train.run import Loop, Machine, Optim, RunConfig, Schedule

    wide = presets.nano(vocab_size=5000)  # enough for the loss in chunks
    cases = {
        "adamw": ("adamw", presets.nano(), "no", 0.0),
        "muon": ("muon", presets.nano(), "no", 0.0),
        "loss in chunks": ("adamw", wide, "no", 0.0),
        "loss in chunks, compiled": ("adamw", wide, "yes", 0.0),
        "targets that do not count": ("adamw", presets.nano(), "no", 0.6),
    }
    for name, (kind, model, compiled, ignored) in cases.items():
        run = RunConfig(
            model=model,
            optim=Optim(kind=kind),
            schedule=Schedule(warmup=2),
            loop=Loop(steps=100, batch=8),
            machine=Machine(device="cuda", precision="float32", compile="no"),
        )
        curves = []
        for captured in (False, True):
            machine = dataclasses.replace(run.machine, compile=compiled if captured else "no")
            state = prepare_state(dataclasses.replace(run, machine=machine))
            step = CapturedStep(state) if captured else train_step
            generator = torch.Generator().manual_seed(0)
            losses = []
            for _ in range(steps):
                ids = torch.randint(0, 9, (8, 65), generator=generator)
                targets = ids[:, 1:].contiguous()
                # a share of its own in each batch: a captured step must not keep the count of the first
                share = ignored * torch.rand((), generator=generator)
                targets[torch.rand(targets.shape, generator=generator) < share] = -100
                batch = Batch(ids[:, :-1].contiguous(), targets).to(state.device)
                losses.append(float(step(state, batch)["loss"]))
            curves.append(losses)
        worst = max(abs(a - b) for a, b in zip(*curves, strict=True))
        yield Finding.judge(f"captured step = eager: {name}", worst, 1e-3, "float32, atomics in the backward pass")
        fell = curves[1][0] - curves[1][-1]
        yield Finding.within(f"captured step learns: {name}", fell, 0.1, None, "nats lost in twelve steps")
        before = [p.detach().clone() for p in state.parameters]
        bias = state.model.decoder.norm.weight
        with torch.no_grad():
            bias[0] = float("nan")
        began = state.step
        try:
            for _ in range(2):  # the second finds out about the first, and must not happen either
                step(state, batch)
            stopped = False
        except NonFinite as error:
            stopped = f"step {began}:" in str(error) and "first at" in str(error) and state.step == began
        changed = sum(not torch.equal(a, b) for a, b in zip(before, state.parameters, strict=True))
        yield Finding.judge(
            f"a poisoned step changes nothing: {name}", changed + 10 * (not stopped), 1, "the poison only"
        )


def tuned_products_equal_torchs() -> Iterator[Finding]:
    """cuBLASLt's products, whichever algorithm was the fastest, against torch's in float32."""
    from glassformer import cublas
    from glassformer.train import fp8

    generator = torch.Generator("cuda").manual_seed(0)
    for rows, columns, inner in ((4096, 3072, 768), (768, 768, 8192), (1024, 50304, 768), (8, 24, 64)):
        left, right = (
            torch.randn(shape, generator=generator, device="cuda") for shape in ((rows, inner), (inner, columns))
        )
        bias = torch.randn(columns, generator=generator, device="cuda").bfloat16()
        for turned in ((False, True), (False, False), (True, False), (True, True)):
            given = [
                (t.T if turn else t).contiguous().bfloat16() for t, turn in zip((left, right), turned, strict=True)
            ]
            factors = [(t.T if turn else t).float() for t, turn in zip(given, turned, strict=True)]
            wanted = factors[0] @ factors[1] + bias.float()
            apart = float((cublas.multiply(*given, *turned, bias).float() - wanted).norm() / wanted.norm())
            yield Finding.judge(
                f"cuBLASLt = torch: {rows}x{columns}x{inner}, turned {turned}", apart, 2**-8, "relative"
            )
        a, b = left.bfloat16(), right.T.contiguous().bfloat16()
        pre = torch.empty(rows, columns, dtype=a.dtype, device="cuda")
        post = cublas.multiply(a, b, right_turned=True, bias=bias, finish="gelu", kept=pre)
        x = (a.float() @ b.float().T + bias.float()).requires_grad_()
        wanted = torch.nn.functional.gelu(x, approximate="tanh")
        slope = cublas.multiply(a, b, right_turned=True, finish="gelu_slope", kept=x.detach().bfloat16())
        (wanted_slope,) = torch.autograd.grad(wanted, x, a.float() @ b.float().T)
        for name, found, exact in (("gelu", post, wanted), ("argument", pre, x), ("slope", slope, wanted_slope)):
            apart = float((found.float() - exact.detach()).norm() / exact.detach().norm())
            yield Finding.judge(f"cuBLASLt = torch: {name}, {rows}x{columns}x{inner}", apart, 2**-7, "relative")
        if rows > 8:
            a, b = left.to(fp8.E5M2), right.T.contiguous().to(fp8.E4M3)
            units = (torch.tensor(0.5, device="cuda"), torch.tensor(4.0, device="cuda"))
            wanted = 2 * (a.float() @ b.float().T)
            for fast, limit in ((False, 2**-8), (True, 2**-6)):
                found = cublas.multiply(a, b, right_turned=True, units=units, fast=fast)
                apart = float((found.float() - wanted).norm() / wanted.norm())
                yield Finding.judge(
                    f"cuBLASLt = torch: 8 bits, {rows}x{columns}x{inner}, fast {fast}", apart, limit, "relative"
                )


def exponentials_equal_their_definition() -> Iterator[Finding]:
    """The product of a head that makes exponentials, at sizes that fill its tiles and at others, against torch."""
    from glassformer.train import exponentials as exp
    from glassformer.train import hopper

    if not hopper.available():
        return
    generator = torch.Generator().manual_seed(0)
    for rows, columns, stride, depth in ((512, 50257, 50304, 768), (1000, 5000, 5000, 200), (70, 2049, 2056, 64)):
        hidden = torch.randn(rows, depth, generator=generator).bfloat16()
        weight = (0.3 * torch.randn(stride, depth, generator=generator)).bfloat16()
        hidden[5] *= 30  # its target is far below its highest logit
        targets = torch.randint(0, columns, (rows,), generator=generator)
        targets[3] = -100
        given = (hidden, weight, targets, -100, 1e-3, columns)
        wanted = exp.exponentials(*given)
        found = [t.cpu() for t in exp.exponentials(*(_on_gpu(t) for t in given))]
        gradients = [e * numbers[2, :, None] for e, numbers in (found, wanted)]
        size = f"{rows}x{columns}x{depth}"
        for name, a, b, limit in (
            ("gradient", *gradients, 2**-8),
            ("gradient of a row far off", gradients[0][5], gradients[1][5], 2**-8),
            ("losses", found[1][:2], wanted[1][:2], 1e-5),
        ):
            apart = float((a.double() - b.double()).norm() / b.double().norm())
            yield Finding.judge(f"exponentials = plain: {name}, {size}", apart, limit, "relative")
        nothing = float(found[0][:, columns:].abs().sum() + found[0][3].abs().sum() + found[1][:, 3].abs().sum())
        yield Finding.judge(f"exponentials: padding and rows ignored, {size}", nothing, 0, "their sum")


def causal_attention_equals_its_definition() -> Iterator[Finding]:
    """Against float64 on a CPU, with cuDNN's own gradient beside it."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from glassformer.train import causal, hopper

    if not hopper.available():
        return
    for B, T, H, as_one in ((2, 1024, 3, True), (3, 256, 50, False), (1, 128, 1, True), (1, 4096, 2, False)):
        given = torch.randn(B, T, 3 * H * 64, generator=torch.Generator().manual_seed(T)).bfloat16()
        parts = [given] if as_one else [t.contiguous() for t in given.chunk(3, -1)]
        d_out = torch.randn(B, T, H * 64, generator=torch.Generator().manual_seed(H)).bfloat16()
        exact, on_gpu = [t.double() for t in parts], [t.cuda() for t in parts]
        out, logs = causal.forward(exact, H, 0.125)
        wanted = causal.backward(exact, out, logs, d_out.double(), H, 0.125)
        found_out, found_logs = causal.forward(on_gpu, H, 0.125)
        found = causal.backward(on_gpu, found_out, found_logs, d_out.cuda(), H, 0.125)
        again = causal.backward(on_gpu, found_out, found_logs, d_out.cuda(), H, 0.125)
        q, k, v = (t.unflatten(-1, (H, 64)).transpose(1, 2).cuda().requires_grad_() for t in given.chunk(3, -1))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.125)
        peer = torch.autograd.grad(o, (q, k, v), d_out.cuda().unflatten(-1, (H, 64)).transpose(1, 2))
        name = f"causal attention, {B} x {T}, {H} heads"
        far = float((found_logs.cpu() - logs).abs().max())
        yield Finding.judge(f"{name}: logarithms", far, 1e-5, "against float64")
        for which, a, b, p in zip(
            "qkv", *(t.chunk(3, -1) if as_one else t for t in (found, wanted)), peer, strict=True
        ):
            there = p.transpose(1, 2).flatten(2).cpu()
            apart, peers = (float((t.cpu() - b).norm() / b.norm()) for t in (a, there))
            yield Finding.judge(f"{name}: d{which}", apart, 2**-7, f"against float64; cuDNN {peers:.1e}")
        yield Finding.judge(f"{name}: repeated", float((found != again).sum()), 0, "numbers that differ")


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was checked")
        return 2
    print(torch.cuda.get_device_name(), torch.__version__)
    findings = []
    checks = (
        tuned_products_equal_torchs,
        exponentials_equal_their_definition,
        causal_attention_equals_its_definition,
        compiled_loss_has_the_plain_gradient,
        captured_step_equals_eager,
        triton_loss_equals_plain,
        cuda_loss_equals_plain,
        float8_kernels_equal_their_definitions,
        float8_learns_as_bfloat16,
        same_logits,
        same_generation,
        graph_replay_equals_eager,
    )
    named = [check for check in checks if not sys.argv[1:] or check.__name__ in sys.argv[1:]]
    for check in named:
        for finding in check():
            findings.append(finding)
            print(finding.text(), flush=True)
    return 0 if findings and all(f.passed for f in findings) else 1


if __name__ == "__main__":
    sys.exit(main())
