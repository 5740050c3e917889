"""Measure speculative decoding: acceptance, and tokens per second with and without a draft, in turns.

    python -m glassformer.bench.developer.speculative block [--precision float32 bfloat16 int8]
        the cost of one pass over k + 1 positions
    python -m glassformer.bench.developer.speculative gpt2 [--precision ...]
        GPT-2 small in size, seeded weights
    python -m glassformer.bench.developer.speculative bard --draft FOLDER
        the bundled models, and a draft of bard

block: GPT-2 small (seeded weights) reads 1, 2, 3, 5 and 9 tokens in one pass, with 127 tokens in its cache. A draft
that is right with probability a gains (1 - a^(k+1)) / (1 - a) tokens per pass (Leviathan et al. 2023, equation 1) at
the cost of one pass over k + 1 positions and k draft tokens. From the table follows how many proposals must be
accepted.

gpt2: untrained weights have no good draft, so the draft is the first 2 of the target's 12 layers, and the branches of
the other 10 are scaled down until the two agree about as often as real pairs do. The cost of a token does not depend
on the weights, so the speed is real; the acceptance is artificial. The vocabulary is 4,096: with 50,257 the head
would dominate the draft, which would then read 0.43 of the target's bytes (--vocabulary). Lookup copies an output
that repeats itself, as the greedy output of a random model with a tied head does: this is the largest possible gain.

bard: trained models. Train the draft first (a minute on two cores):

    glass train --set out=runs/draft --set model.n_layers=1 --set model.d_model=128 --set model.n_heads=4 \
        --set model.max_len=256 --set loop.context=256 --set loop.batch=12 --set loop.steps=1200 \
        --set optim.kind=muon --set optim.lr=3e-3 --set optim.muon_lr=0.03

Times are those of all tokens after the first pass, which reads the prompt; medians over rounds. Greedy output must be
the same with and without a draft; where it differs, the first position is printed (rounding decided a tie).
"""

import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch

from glassformer import config as c
from glassformer.bench.commands import in_turns, parser, seconds_of
from glassformer.config import presets
from glassformer.generation import Sampling, stream
from glassformer.generation.engine import Call, Precision, choose_engine
from glassformer.generation.request import Draft, GenerationRequest
from glassformer.generation.speculate import Acceptance, Speculation, make_readers
from glassformer.model import DecoderLM, build
from glassformer.model.block import Block
from glassformer.model.layers import Dense
from glassformer.weights import load, load_tokenizer

PrecisionName = Precision | Literal["torch"]
"""A precision of the compiled kernels, or `torch`: the engine in float32."""
GREEDY, SAMPLED = Sampling(0.0), Sampling(temperature=0.8, top_k=50)


@dataclass
class Case:
    """One comparison: target, draft, proposals per pass, prompt, new tokens, sampling, engine options."""

    name: str
    target: DecoderLM
    draft: Draft
    k: int
    prompt: list[int]
    new: int
    sampling: Sampling
    how: dict[str, Any]


def timed(case: Case, draft: Draft | None, seed: int) -> tuple[float, list[int | None], Acceptance | None]:
    """Return tokens per second after the first pass, the tokens, and the acceptance if there is a draft."""
    given = {**case.how, "draft": draft, "draft_tokens": case.k, "seed": seed, "stop": []}
    steps = stream(case.target, [case.prompt], case.new, sampling=case.sampling, **given)
    tokens = [next(steps)[0]]
    already = len(steps.sequences[0].new) if isinstance(steps, Speculation) else 1
    begin = time.perf_counter()
    tokens += [gained[0] for gained in steps]
    seconds = time.perf_counter() - begin
    return (case.new - already) / seconds, tokens, steps.acceptance[0] if isinstance(steps, Speculation) else None


def compare(cases: list[Case], rounds: int) -> None:
    """Print a table with one line per case."""
    print(f"{'':44} {'k':>2} {'accepted':>9} {'per pass':>9} {'plain/s':>9} {'draft/s':>9} {'ratio':>6}")
    for case in cases:
        timed(case, None, 0), timed(case, case.draft, 0)
        plain, fast, accepted, proposed, passes = [], [], 0, 0, 0
        for seed in range(rounds):
            speed, wanted, _ = timed(case, None, seed)
            plain.append(speed)
            speed, found, counts = timed(case, case.draft, seed)
            fast.append(speed)
            assert counts is not None
            accepted, proposed, passes = (
                accepted + counts.accepted,
                proposed + counts.proposed,
                passes + counts.passes,
            )
            if case.sampling is GREEDY and wanted != found:
                where = next(i for i, (a, b) in enumerate(zip(wanted, found, strict=True)) if a != b)
                print(f"  another greedy token at position {where}: a tie within rounding")
        a, b = statistics.median(plain), statistics.median(fast)
        rate, per_pass = accepted / max(proposed, 1), rounds * case.new / passes
        print(f"{case.name:44} {case.k:>2} {rate:>9.0%} {per_pass:>9.2f} {a:>9.1f} {b:>9.1f} {b / a:>6.2f}", flush=True)


def gpt2(seed: int = 0, **changes: Any) -> DecoderLM:
    model = build(presets.gpt2(**changes), seed=seed)
    assert isinstance(model, DecoderLM)
    return model.eval()


def cut(layers: int, scale: float, vocabulary: int) -> tuple[DecoderLM, DecoderLM]:
    """Return a target, and its first layers as a draft. The head is scaled up, so that predictions are confident."""
    changes: dict[str, Any] = {"head": c.Head(tied=False), "vocab_size": vocabulary, "special": c.Special()}
    target = gpt2(**changes)
    with torch.no_grad():
        assert target.head is not None
        assert target.head.weight is not None
        target.head.weight.mul_(5)
        for block in list(target.blocks)[layers:]:
            assert isinstance(block, Block)
            assert isinstance(block.feedforward, Dense)
            for branch in (block.attention.o, block.feedforward.down):
                branch.weight.mul_(scale)
                branch.bias.mul_(scale)
    draft = gpt2(**changes, n_layers=layers)
    draft.load_state_dict({name: target.state_dict()[name] for name in draft.state_dict()})
    return target, draft


def blocks(precisions: list[PrecisionName], rounds: int) -> None:
    """Print the time of one pass over several positions, by precision."""
    model = gpt2()
    row = torch.randint(0, 50257, (160,), generator=torch.Generator().manual_seed(0)).tolist()
    widths = (1, 2, 3, 5, 9)
    print(f"{'one pass over':>24} " + " ".join(f"{width:>9}" for width in widths) + "  tokens, ms (ratio to one)")
    for name in precisions:
        request = GenerationRequest([row[:128]], 32, draft="lookup", draft_tokens=16)
        call = Call.of(model, request)
        chosen = choose_engine(call, "torch", "float32") if name == "torch" else choose_engine(call, "native", name)
        for _ in range(2):  # the second use of a model puts its weights into huge pages
            _, (reader,) = make_readers(model, request, chosen)
        with torch.no_grad():
            reader.logits(row[:128], 1)
            reads = {width: partial(reader.logits, row[: 127 + width], width) for width in widths}
            times = in_turns({width: partial(seconds_of, read) for width, read in reads.items()}, rounds)
        median = {width: 1000 * statistics.median(times[width]) for width in widths}
        cells = (f"{median[width]:.1f} ({median[width] / median[1]:.2f})" for width in widths)
        print(f"{name:>24} " + " ".join(f"{cell:>12}" for cell in cells), flush=True)


def gpt2_cases(precisions: list[str], scale: float, vocabulary: int, device: str) -> list[Case]:
    repeating, target, draft = (model.to(device) for model in (gpt2(), *cut(2, scale, vocabulary)))
    prompt = torch.randint(0, vocabulary, (32,), generator=torch.Generator().manual_seed(0)).tolist()
    cases = []
    for name in precisions:
        how = {"engine": "torch"} if name == "torch" else {"engine": "native", "precision": name}
        for k in (2, 4):
            cases.append(Case(f"{name}: draft of 2 layers, greedy", target, draft, k, prompt, 97, GREEDY, how))
            cases.append(Case(f"{name}: draft of 2 layers, sampled", target, draft, k, prompt, 97, SAMPLED, how))
        cases.append(Case(f"{name}: lookup, greedy, repeats itself", repeating, "lookup", 4, prompt, 97, GREEDY, how))
    return cases


def bard_cases(folder: str | None, engine: str) -> list[Case]:
    bard, induction = (load(name, dtype="float32") for name in ("bard", "induction"))
    assert isinstance(bard, DecoderLM)
    assert isinstance(induction, DecoderLM)
    tokenizer, how, torch_ = load_tokenizer("bard"), {"engine": engine}, {"engine": "torch"}
    prompt = tokenizer.encode("ROMEO:").ids
    refrain = tokenizer.encode("To morrow, and to morrow, and to morrow,\nCreeps in this petty pace.\n" * 2).ids
    pattern = torch.randperm(induction.config.vocab_size, generator=torch.Generator().manual_seed(0))[:12].tolist()
    room = (induction.config.max_len or 256) - 24
    cases = [
        Case("bard, lookup, greedy", bard, "lookup", 4, prompt, 200, GREEDY, how),
        Case("bard, lookup, sampled", bard, "lookup", 4, prompt, 200, SAMPLED, how),
        Case("bard, lookup after a refrain, greedy", bard, "lookup", 4, refrain, 100, GREEDY, how),
        Case(
            "induction (torch), lookup, a repetition",
            induction,
            "lookup",
            4,
            pattern * 2,
            min(room, 64),
            GREEDY,
            torch_,
        ),
    ]
    if folder is not None:
        draft = load(folder, dtype="float32")
        assert isinstance(draft, DecoderLM)
        for k in (1, 2, 4, 6):
            cases.append(Case("bard, trained draft, greedy", bard, draft, k, prompt, 200, GREEDY, how))
            cases.append(Case("bard, trained draft, sampled", bard, draft, k, prompt, 200, SAMPLED, how))
    return cases


def main() -> None:
    options = parser(__doc__)
    options.add_argument("what", choices=["block", "gpt2", "bard"], help="Which table to print; see above.")
    options.add_argument(
        "--precision", nargs="+", default=["float32", "bfloat16", "int8", "torch"],
        choices=[*get_args(Precision), "torch"], help="Precisions of the kernels, or torch. Default: four of them.",
    )  # fmt: skip
    options.add_argument("--rounds", type=int, default=5, help="Rounds in which both take turns. Default: 5.")
    options.add_argument("--scale", type=float, default=0.05, help="gpt2: scale of the layers that the draft lacks.")
    options.add_argument("--vocabulary", type=int, default=4096, help="gpt2: vocabulary of target and draft.")
    options.add_argument("--device", default="cpu", help="gpt2: cpu, or cuda together with --precision torch.")
    options.add_argument("--draft", metavar="FOLDER", help="bard: a model folder that `glass train` wrote.")
    options.add_argument("--engine", default="native", choices=["native", "torch"], help="bard: the engine to use.")
    given = options.parse_args()
    if given.what == "block":
        blocks(given.precision, given.rounds)
    elif given.what == "gpt2":
        compare(gpt2_cases(given.precision, given.scale, given.vocabulary, given.device), given.rounds)
    else:
        compare(bard_cases(given.draft, given.engine), given.rounds)


if __name__ == "__main__":
    main()
