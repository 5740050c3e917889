"""The engine on a CUDA device against itself on the CPU. Needs torch alone, so it runs on a bare GPU image.

PYTHONPATH=src python -m glassformer.bench.gpu.cuda_check [NAME OF A CHECK ...]
"""

import dataclasses
import sys
from collections.abc import Iterator

import torch

from glassformer.bench.gpu import cuda_kernels
from glassformer.config import Alibi, ModelConfig, T5Bias, presets, replace
from glassformer.finding import Finding
from glassformer.generation import Sampling, generate
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


def float8_learns_as_bfloat16(steps: int = 60) -> Iterator[Finding]:
    """Blocks and head in 8 bits, compiled and captured, beside the same run in bf16."""
    from glassformer.training.graph import CapturedStep
    from glassformer.training.loop import prepare_state
    from glassformer.training.objective import Batch
    from glassformer.training.run import Loop, Machine, Optim, Run, Schedule

    curves = []
    for products in ("precision", "float8"):
        run = Run(
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

    from glassformer.kernels.cuda.training.fused_loss import linear_cross_entropy

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
    from glassformer.training.graph import CapturedStep
    from glassformer.training.health import NonFinite
    from glassformer.training.loop import prepare_state, train_step
    from glassformer.training.objective import Batch
    from glassformer.training.run import Loop, Machine, Optim, Run, Schedule

    wide = presets.nano(vocab_size=5000)  # enough for the loss in chunks
    cases = {
        "adamw": ("adamw", presets.nano(), "no", 0.0),
        "muon": ("muon", presets.nano(), "no", 0.0),
        "loss in chunks": ("adamw", wide, "no", 0.0),
        "loss in chunks, compiled": ("adamw", wide, "yes", 0.0),
        "targets that do not count": ("adamw", presets.nano(), "no", 0.6),
    }
    for name, (kind, model, compiled, ignored) in cases.items():
        run = Run(
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


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was checked")
        return 2
    print(torch.cuda.get_device_name(), torch.__version__)
    findings = []
    checks = (
        cuda_kernels.tuned_products_equal_torchs,
        cuda_kernels.exponentials_equal_their_definition,
        cuda_kernels.gelu_products_equal_their_definition,
        cuda_kernels.causal_attention_equals_its_definition,
        compiled_loss_has_the_plain_gradient,
        captured_step_equals_eager,
        cuda_kernels.triton_loss_equals_plain,
        cuda_kernels.cuda_loss_equals_plain,
        cuda_kernels.float8_kernels_equal_their_definitions,
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
