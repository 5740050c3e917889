"""Compare the memory of whole processes, as the operating system reports it, with what `glassformer.sizing` predicts.

    python -m glassformer.bench.developer.memory [CASE ...]

Each case runs in fresh processes. Its memory is the peak resident set (VmHWM) minus the resident set before the model
was built, when torch was loaded and warm. The prediction counts torch's tensors. It is compared with two
measurements. For the first, MALLOC_MMAP_THRESHOLD_ is set, so that glibc returns a freed tensor to the system at
once. The second is glibc's default, which keeps some freed memory: up to an eighth more where parameters dominate.
The exit code is 1 if the first measurement is more than 10 % from its prediction.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from glassformer.bench.commands import in_process, parser

if TYPE_CHECKING:
    from torch import Tensor, nn

MODULE = "glassformer.bench.developer.memory"
WITHIN = 0.10
CASES = ("train gpt2", "train bert-like bfloat16", "prefill gpt2_medium", "encode t5_base")


def resident(field: str) -> int:
    """Return VmRSS or VmHWM of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}: this benchmark needs Linux.")


def measure(case: str) -> dict[str, int]:
    """Run one case in this process."""
    import torch

    from glassformer.config import presets
    from glassformer.model import DecoderLM, Seq2Seq, build
    from glassformer.sizing import inference_memory, training_memory

    torch.manual_seed(0)
    train_steps(build(presets.nano()).train(), torch.randint(0, 65, (2, 64)))  # loads all libraries that a step uses
    before = resident("VmRSS")
    if case == "train gpt2":
        config = presets.gpt2(dropout=0.0)
        train_steps(build(config).train(), torch.randint(0, config.vocab_size, (2, 256)))
        predicted = training_memory(config, 2, 256).peak
    elif case == "train bert-like bfloat16":
        config = presets.bert_base(n_layers=6)
        train_steps(build(config, dtype=torch.bfloat16).train(), torch.randint(0, config.vocab_size, (4, 256)))
        predicted = training_memory(config, 4, 256, "bfloat16").peak
    elif case == "prefill gpt2_medium":
        config = presets.gpt2_medium()
        model = build(config).eval()
        assert isinstance(model, DecoderLM)
        with torch.inference_mode():
            model(torch.randint(0, config.vocab_size, (4, 256)), cache=model.new_cache())
        predicted = inference_memory(config, 4, 256).prefill_peak
    elif case == "encode t5_base":
        config = presets.t5_base()
        seq2seq = build(config).eval()
        assert isinstance(seq2seq, Seq2Seq)
        with torch.inference_mode():
            ids = torch.randint(0, config.vocab_size, (8, 256))
            seq2seq(ids, ids[:, :32], cache=seq2seq.new_cache())
        predicted = inference_memory(config, 8, 32, source=256).prefill_peak
    else:
        raise ValueError(f"there is no case {case!r}.")
    return {"measured": resident("VmHWM") - before, "predicted": predicted}


def train_steps(model: "nn.Module", tokens: "Tensor") -> None:
    """Run two optimizer steps."""
    import torch
    import torch.nn.functional as F

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(2):
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("cases", nargs="*", metavar="CASE", help=f"Cases to run. Default: {', '.join(CASES)}.")
    options.add_argument("--measure", metavar="CASE", help=argparse.SUPPRESS)
    given = options.parse_args()
    for case in given.cases:
        if case not in CASES:
            options.error(f"there is no case {case!r}: use {', '.join(map(repr, CASES))}.")
    if given.measure:
        print(json.dumps(measure(given.measure)))
        return 0
    print(f"{'MiB':28} {'predicted':>10} {'measured':>10} {'off':>7} {'glibc default':>15} {'off':>7}")
    worst = 0.0
    for case in given.cases or CASES:
        [tight] = in_process(MODULE, "--measure", case, MALLOC_MMAP_THRESHOLD_="131072")
        [default] = in_process(MODULE, "--measure", case)
        predicted = tight["predicted"]
        off, loose = (predicted / got["measured"] - 1 for got in (tight, default))
        worst = max(worst, abs(off))
        numbers = [n / 2**20 for n in (predicted, tight["measured"], default["measured"])]
        print(
            f"{case:28} {numbers[0]:>10.0f} {numbers[1]:>10.0f} {off:>7.1%} {numbers[2]:>15.0f} {loose:>7.1%}",
            flush=True,
        )
    return int(worst > WITHIN)


if __name__ == "__main__":
    sys.exit(main())
