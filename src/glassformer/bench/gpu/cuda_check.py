"""Compare the model and the kernels on a CUDA device with the CPU. It needs little more than torch.

PYTHONPATH=src python -m glassformer.bench.gpu.cuda_check [NAME OF A CHECK ...]
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch

from glassformer.bench.commands import parser
from glassformer.bench.gpu import cuda_kernels
from glassformer.bench.gpu.device import require_gpu
from glassformer.config import Alibi, ModelConfig, T5Bias, presets, replace
from glassformer.config.optimizer import OptimizerKind
from glassformer.finding import Finding
from glassformer.generation import Sampling, generate
from glassformer.model import DecoderLM, build

if TYPE_CHECKING:
    from glassformer.training.loop import TrainState
    from glassformer.training.objective import Batch


def configs() -> dict[str, ModelConfig]:
    """Return one small config per position scheme, and one with experts."""
    nano = presets.nano(n_layers=3, max_len=128)
    return {
        "learned": nano,
        "rotary, grouped": presets.llama_tiny(),
        "alibi": replace(nano, position=Alibi()),
        "t5 bias, window": replace(nano, position=T5Bias(), window=17),
        "experts": presets.moe_tiny(),
    }


def same_logits() -> Iterator[Finding]:
    """Compare logits of both devices in float64, with left padding."""
    for name, config in configs().items():
        on_cpu = build(config, seed=1, dtype=torch.float64)
        on_gpu = build(config, seed=1, dtype=torch.float64, device="cuda")
        tokens = torch.randint(0, config.vocab_size, (3, 50), generator=torch.Generator().manual_seed(0))
        mask = torch.arange(50)[None] >= torch.tensor([[0], [9], [49]])
        with torch.no_grad():
            difference = on_cpu(tokens, mask=mask) - on_gpu(tokens.cuda(), mask=mask.cuda()).cpu()
        yield Finding.judge(f"cuda = cpu: {name}", float(difference[mask].abs().max()), 1e-10, "float64 on both")


def same_generation() -> Iterator[Finding]:
    """Compare generated tokens in float64: greedy, sampled (the same uniform numbers), beam search, with drafts."""
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8]]
    ways: dict[str, dict[str, Any]] = {
        "greedy": {},
        "sampled": {"sampling": Sampling(top_p=0.9)},
        "sampled, top-k": {"sampling": Sampling(0.8, 5, 0.9, 0.01, 1.2), "stop": []},
        "beams": {"beams": 3},
        "lookup": {"draft": "lookup"},
        "lookup, sampled": {"draft": "lookup", "sampling": Sampling(top_p=0.9)},
    }
    for name, config in configs().items():
        models = [build(config, seed=1, dtype=torch.float64, device=device) for device in ("cpu", "cuda")]
        for how, settings in ways.items():
            a, b = (generate(model, prompts, 60, **settings) for model in models)
            wrong = sum(x != y for row, other in zip(a, b, strict=True) for x, y in zip(row, other, strict=True))
            yield Finding.judge(f"cuda = cpu, {how}: {name}", wrong, 0, "tokens that differ")


@torch.no_grad()
def graph_replay_equals_eager(steps: int = 40) -> Iterator[Finding]:
    """Compare a decode step on a fixed static cache, replayed as a CUDA graph, with plain calls."""
    for name, config in configs().items():
        if name == "experts":
            continue  # the host reads its routing, so the step cannot be captured
        model = build(config, seed=1, device="cuda").eval()
        assert isinstance(model, DecoderLM)
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


def captured_losses(state: "TrainState", steps: int) -> list[float]:
    """Return the losses of captured steps on tokens of which some are more frequent, the same for every state."""
    from glassformer.training.graph import CapturedStep
    from glassformer.training.objective import Batch

    step, draw, losses = CapturedStep(state), torch.Generator().manual_seed(0), []
    for _ in range(steps):
        ids = (torch.rand(state.run.loop.batch, state.run.context + 1, generator=draw) ** 3 * 50).long()
        batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()).to(state.device)
        losses.append(float(step(state, batch)["loss"]))
    return losses


def float8_learns_as_bfloat16(steps: int = 60) -> Iterator[Finding]:
    """Compare a run whose blocks and head are in fp8, compiled and captured, with the same run in bf16."""
    from glassformer.training.loop import prepare_state
    from glassformer.training.run import Loop, Machine, Optim, Run, Schedule

    curves = []
    choices: tuple[Literal["precision", "float8"], ...] = ("precision", "float8")
    for products in choices:
        run = Run(
            model=presets.nano(vocab_size=5003),
            optim=Optim(lr=3e-3),
            schedule=Schedule(warmup=2),
            loop=Loop(steps=100, batch=8),
            machine=Machine(device="cuda", precision="bfloat16", compile="yes", products=products),
        )
        curves.append(captured_losses(prepare_state(run), steps))
    apart = abs(sum(curves[0][-10:]) - sum(curves[1][-10:])) / 10
    yield Finding.judge("float8 learns like bfloat16", apart, 0.05, "nats, mean of the last ten steps")
    yield Finding.within("float8 learns", curves[1][0] - curves[1][-1], 3.0, None, "nats, fall of the loss in 60 steps")


def fused_blocks_learn_as_the_engine(steps: int = 24) -> Iterator[Finding]:
    """Compare captured steps of fused blocks with those of the engine's own blocks, both without torch.compile."""
    from glassformer.kernels import training as kernels
    from glassformer.training.loop import prepare_state
    from glassformer.training.run import Loop, Machine, Optim, Run, Schedule

    every = kernels.TRAINING_KERNELS
    for name in ("gpt2", "llama3_2_1b", "qwen3_0_6b", "gemma_2b"):
        model = replace(presets.get(name), n_layers=2, dropout=0.0)
        run = Run(
            model=model,
            optim=Optim(lr=1e-3),
            schedule=Schedule(warmup=2),
            loop=Loop(steps=100, batch=8, context=1024),
            machine=Machine(device="cuda", precision="bfloat16", stream="bfloat16", compile="no"),
        )
        curves = []
        for left_out in ((), (kernels.FUSED_BLOCKS, "causal attention")):
            kernels.TRAINING_KERNELS = tuple(kernel for kernel in every if kernel.name not in left_out)
            state = prepare_state(run)
            kernels.TRAINING_KERNELS = every
            curves.append(captured_losses(state, steps))
            if not left_out:
                used = kernels.FUSED_BLOCKS in state.kernels
                yield Finding.judge(f"fused blocks are used: {name}", int(not used), 0, ", ".join(state.kernels))
        apart = max(abs(a - b) for a, b in zip(*curves, strict=True))
        yield Finding.judge(
            f"fused blocks = engine: {name}", apart, 0.1, f"nats, the most in {steps} steps of bfloat16"
        )
        yield Finding.within(f"fused blocks learn: {name}", curves[0][0] - curves[0][-1], 1.0, None, "nats")


def compiled_loss_has_the_plain_gradient() -> Iterator[Finding]:
    """Compare the gradient of the compiled head and loss, in chunks, with autograd through all logits."""
    from torch.nn.functional import cross_entropy, linear

    from glassformer.training.chunked_loss import linear_cross_entropy

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
        yield Finding.judge(f"compiled loss = plain: {columns}", worst, 1e-3, "float32 (TF32 matmuls), relative")


def captured_step_equals_eager(steps: int = 12) -> Iterator[Finding]:
    """Compare twelve steps as one CUDA graph with twelve plain ones; then a NaN weight must stop training."""
    from glassformer.training.graph import CapturedStep
    from glassformer.training.loop import prepare_state, train_step
    from glassformer.training.objective import Batch
    from glassformer.training.run import Loop, Machine, Optim, Run, Schedule

    wide = presets.nano(vocab_size=5000)  # large enough for the loss in chunks
    cases: dict[str, tuple[OptimizerKind, ModelConfig, Literal["yes", "no"], float]] = {
        "adamw": ("adamw", presets.nano(), "no", 0.0),
        "muon": ("muon", presets.nano(), "no", 0.0),
        "loss in chunks": ("adamw", wide, "no", 0.0),
        "loss in chunks, compiled": ("adamw", wide, "yes", 0.0),
        "ignored targets": ("adamw", presets.nano(), "no", 0.6),
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
                # Each batch ignores another share: a captured step must not keep the count of the first batch.
                share = ignored * torch.rand((), generator=generator)
                targets[torch.rand(targets.shape, generator=generator) < share] = -100
                batch = Batch(ids[:, :-1].contiguous(), targets).to(state.device)
                losses.append(float(step(state, batch)["loss"]))
            curves.append(losses)
        worst = max(abs(a - b) for a, b in zip(*curves, strict=True))
        yield Finding.judge(f"captured step = eager: {name}", worst, 1e-3, "float32, atomics in the backward pass")
        fell = curves[1][0] - curves[1][-1]
        yield Finding.within(f"captured step learns: {name}", fell, 0.1, None, "nats, fall of the loss in 12 steps")
        yield poisoned_step_changes_nothing(name, state, step, batch)


def poisoned_step_changes_nothing(name: str, state: "TrainState", step: Callable[..., Any], batch: "Batch") -> Finding:
    """Set one weight to NaN: the step must be refused, name the module, and leave every other parameter as it was."""
    from glassformer.training.health import NonFinite

    before = [p.detach().clone() for p in state.parameters]
    assert isinstance(state.model, DecoderLM)
    norm = state.model.decoder.norm
    assert norm is not None
    assert norm.weight is not None
    with torch.no_grad():
        norm.weight[0] = float("nan")
    first = state.step
    try:
        for _ in range(2):  # a captured step reports the first failure at the second call, which must not run either
            step(state, batch)
        stopped = False
    except NonFinite as error:
        stopped = f"step {first}:" in str(error) and "first at" in str(error) and state.step == first
    changed = sum(not torch.equal(a, b) for a, b in zip(before, state.parameters, strict=True))
    text = "only the parameter that was set to NaN differs"
    return Finding.judge(f"a poisoned step changes nothing: {name}", changed + 10 * (not stopped), 1, text)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("checks", nargs="*", metavar="CHECK", help="Names of checks. Default: all of them.")
    given = options.parse_args()
    require_gpu()
    print(torch.cuda.get_device_name(), torch.__version__)
    findings = []
    checks = (
        cuda_kernels.causal_attention_equals_its_definition,
        cuda_kernels.gelu_of_cublaslt_equals_its_definition,
        compiled_loss_has_the_plain_gradient,
        captured_step_equals_eager,
        fused_blocks_learn_as_the_engine,
        cuda_kernels.cuda_loss_equals_plain,
        cuda_kernels.float8_kernels_equal_their_definitions,
        float8_learns_as_bfloat16,
        same_logits,
        same_generation,
        graph_replay_equals_eager,
    )
    names = [check.__name__ for check in checks]
    if unknown := [name for name in given.checks if name not in names]:
        options.error(f"there is no check {unknown[0]}: use {', '.join(names)}.")
    for check in (check for check in checks if not given.checks or check.__name__ in given.checks):
        for finding in check():
            findings.append(finding)
            print(finding.text(), flush=True)
    return 0 if findings and all(f.passed for f in findings) else 1


if __name__ == "__main__":
    sys.exit(main())
