"""Steps of many sequences: the kernels compiled for the CPU, between torch's products, give the engine's logits."""

import ctypes
import dataclasses

import pytest
import torch

from glassformer import config as c
from glassformer.generation.state import pad
from glassformer.kernels.cuda.decode import batch
from glassformer.kernels.cuda.decode.pack import source
from tests.emulated_cuda import built, needs_compiler
from tests.kernels.cuda.decode.emulated import HERE, MACHINE
from tests.variants import POSITIONS, decoder, lively


class Emulated(batch.CudaBatch):
    """Without a graph, and with launches on the CPU."""

    def __init__(self, model, rows, capacity, dtype=torch.float32):
        super().__init__(model, rows, capacity, dtype)
        self.sizes_of = {name: batch.batch_sizes(model, dtype, name) for name in batch.WARPS}
        self.kernels = {}

    def _run(self):
        self._body()

    def _launch(self, name, blocks, **changes):
        if name not in self.kernels:  # one that is never launched need not be compiled
            text = source(self.sizes_of[name], ("batch.cu",), MACHINE)
            self.kernels[name] = built(text, name, HERE)
            assert self.kernels[name].size() == ctypes.sizeof(batch.Arguments)
        self.kernels[name].run(ctypes.byref(self.arguments(**changes)), blocks, 32 * batch.WARPS[name])


@torch.no_grad()
def differences(config, dtype=torch.float32):
    """Rows of unequal lengths, three greedy steps: relative differences of each step's logits, and of the tokens."""
    model = lively(config, std=0.4)[0].float()
    prompts = [[3, 4, 5, 6], [7, 8, 9, 10, 11, 12, 13], [9, 2, 4, 1]]
    made = Emulated(model, 3, 20, dtype)
    tokens, real = pad([p[:-1] for p in prompts], "left", model.device)
    cache = model.new_cache("growing")
    model(tokens, real, cache=cache)
    made.take(cache)
    tokens, found, said = torch.tensor([p[-1] for p in prompts]), [], []
    for _ in range(3):
        logits = made.step(tokens)
        wanted = torch.stack([model(torch.tensor([p]))[0, -1] for p in prompts])
        found.append(float((logits - wanted).abs().max() / wanted.abs().max()))
        tokens = wanted.argmax(-1)
        said.append(made.tokens.tolist() == tokens.tolist())
        prompts = [[*p, int(t)] for p, t in zip(prompts, tokens, strict=True)]
    assert all(said)
    return found


def small(name, modern):
    feed = c.Gated(48, bias=True) if modern else c.Dense(136)
    changes = {"feedforward": feed} | ({"window": 5, "norm": c.RMSNorm()} if modern else {})
    return decoder(position=POSITIONS[name], head=c.Head(tied=False), d_model=40, attention__d_head=16, **changes)


@pytest.mark.sample(1)
@needs_compiler
@pytest.mark.parametrize(("name", "modern", "shares"), [("learned", False, 1), ("rotary-halves", True, 2)])
def test_it_is_the_engine(name, modern, shares, monkeypatch):
    monkeypatch.setattr(batch, "SHARES", dict.fromkeys(batch.SHARES, shares))
    assert max(differences(small(name, modern))) < 1e-5  # float32 sums in another order, exponentials to the base 2


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("modern", [False, True])
@pytest.mark.parametrize("name", ["none", "sinusoidal", "rotary-interleaved", "rotary-yarn", "rotary-llama3"])
def test_every_position_scheme(name, modern):
    assert max(differences(small(name, modern))) < 1e-5


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_of_the_likeliest_is_chosen_and_noted(dtype):
    of_a_warp = 32 * 16 // dtype.itemsize  # logits that it reads at a time, in loads of 16 bytes
    of_all = of_a_warp * batch.WARPS["choose"]
    vocab = of_all + 5  # the first warp reads twice: its second place is behind every other warp's
    config = dataclasses.replace(small("none", False), vocab_size=vocab)
    made = Emulated(lively(config)[0].float(), 5, 20, dtype)
    assert made.sizes["COLUMNS"] > vocab
    made.logits.fill_(-1)
    made.logits[:, vocab:] = 9  # what stands beyond the vocabulary is no token
    made.logits[0, vocab - 1] = 3
    made.logits[1, 5] = made.logits[1, 2] = made.logits[1, of_a_warp] = 4
    made.logits[2, of_a_warp + 6] = 3  # the second warp's: the first must wait to hear of it
    made.logits[3, of_all + 1] = made.logits[3, of_a_warp + 7] = 4
    made.logits[4] = float("nan")
    made.lengths.copy_(torch.tensor([4, 6, 0, 9, 0]))
    made._launch("choose", 5)
    chosen = [vocab - 1, 2, of_a_warp + 6, of_a_warp + 7]
    assert made.tokens.tolist()[:4] == chosen
    assert 0 <= int(made.tokens[4]) < vocab
    assert made.lengths.tolist() == [5, 7, 1, 10, 1]
    assert [int(made.history[row, at]) for row, at in enumerate((5, 7, 1, 10))] == chosen
