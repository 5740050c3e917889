"""The loss of a vocabulary that ranks divide, against the loss of one process."""

import copy

import pytest
import torch

import glassformer as gf
from glassformer.training import chunked_loss, objective
from glassformer.training.distributed.tensor import Division
from glassformer.training.distributed.vocabulary import Vocabulary
from glassformer.training.objective import IGNORED, Batch, summed_loss
from glassformer.training.run import Loss
from tests.training.distributed.threads import Threads, on_ranks

SIZES = {"n_layers": 1, "d_model": 8, "n_heads": 2, "d_ff": 16, "max_len": 16, "vocab_size": 29}
HEADS = {
    "tied": {},
    "untied with a bias": {"head__tied": False, "head__bias": True},
    "capped and scaled": {"head__softcap": 3.0, "head__scale": 0.5},
}


def only_the_vocabulary(model: gf.DecoderLM, ranks: Threads) -> gf.DecoderLM:
    """Divide embedding and head, and nothing else."""
    division, own = Division(ranks, model.config.vocab_size), copy.deepcopy(model)
    for name in ("embed.tokens.weight", "head.weight", "head.bias"):
        owner, _, leaf = name.rpartition(".")
        module, whole = own.get_submodule(owner), dict(model.named_parameters()).get(name)
        if whole is not None:
            part = whole.detach()[division.part(name, whole.shape)].clone()
            setattr(module, leaf, torch.nn.Parameter(part))
    Vocabulary(ranks, model.config.vocab_size).divide(own)
    return own


def batch() -> Batch:
    ids = torch.randint(0, 29, (3, 8), generator=torch.Generator().manual_seed(0))
    targets = ids[:, 1:].contiguous()
    targets[0, :3] = IGNORED
    return Batch(ids[:, :-1].contiguous(), targets)


@pytest.mark.parametrize("large", [False, True], ids=["logits", "in chunks"])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("loss", [Loss(), Loss(label_smoothing=0.2, z_loss=0.01)], ids=["plain", "smoothed"])
def test_losses_and_gradients_are_those_of_one_process(monkeypatch, head, loss, large):
    if large:
        monkeypatch.setattr(objective, "CHUNKED_FROM", 2)
        monkeypatch.setattr(chunked_loss, "CHUNK_BYTES", 4 * 29 * 8)  # 8 tokens at a time
    model = gf.build(gf.presets.llama_tiny(**SIZES, **HEADS[head]), seed=0).double()
    total, plain = summed_loss(model, batch(), loss, True)
    total.backward()
    _, evaluated = summed_loss(model, batch(), loss, False)

    def divided(ranks: Threads):
        own = only_the_vocabulary(model, ranks)
        found = summed_loss(own, batch(), loss, True)
        found[0].backward()
        with torch.no_grad():
            _, same = summed_loss(own, batch(), loss, False)
            logits = own(batch().inputs)
        return *(v.detach() for v in found), same, {name: p.grad for name, p in own.named_parameters()}, logits

    found = on_ranks(3, divided)
    with torch.no_grad():
        logits = model(batch().inputs)
    for own_total, own_plain, own_evaluated, gradients, own_logits in found:
        torch.testing.assert_close((own_total, own_plain, own_evaluated), (total, plain, evaluated), check_dtype=False)
        torch.testing.assert_close(own_logits, logits)
        for name, parameter in model.decoder.named_parameters():
            torch.testing.assert_close(gradients[f"decoder.{name}"], parameter.grad, rtol=1e-5, atol=1e-6)
    for name in ("embed.tokens.weight", "head.weight", "head.bias"):
        if name in found[0][3]:
            joined = torch.cat([gradients[name] for *_, gradients, _ in found])
            torch.testing.assert_close(joined, dict(model.named_parameters())[name].grad, rtol=1e-5, atol=1e-6)


def test_no_rank_holds_the_logits_of_all_ids():
    shapes = []

    def divided(ranks: Threads):
        own = only_the_vocabulary(gf.build(gf.presets.llama_tiny(**SIZES), seed=0), ranks)
        seen = Vocabulary.gradients

        def gradients(self, logits, *given):
            shapes.append(tuple(logits.shape))
            return seen(self, logits, *given)

        own.head.parallel_loss.__self__.gradients = gradients.__get__(own.head.parallel_loss.__self__)
        summed_loss(own, batch(), Loss(), True)

    on_ranks(4, divided)
    assert sorted(shapes) == [(21, 7), (21, 7), (21, 7), (21, 8)]
