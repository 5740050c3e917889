"""The engine on a CUDA device against itself on the CPU. Needs torch alone, so it runs on a bare GPU image.

PYTHONPATH=src python benchmarks/cuda_check.py
"""

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
    """Greedy, sampled (same uniform numbers on both devices) and beams, in float64."""
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8]]
    for name, config in configs().items():
        models = [build(config, seed=1, dtype=torch.float64, device=device) for device in ("cpu", "cuda")]
        for how, settings in {
            "greedy": {},
            "sampled": {"sampling": Sampling(top_p=0.9)},
            "beams": {"beams": 3},
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


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was checked")
        return 2
    print(torch.cuda.get_device_name(), torch.__version__)
    findings = []
    for check in (same_logits, same_generation, graph_replay_equals_eager):
        for finding in check():
            findings.append(finding)
            print(finding.text(), flush=True)
    return 0 if all(f.passed for f in findings) else 1


if __name__ == "__main__":
    sys.exit(main())
