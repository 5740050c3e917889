"""Training a little: one batch learned by heart, and a source whose entropy nothing honest gets below."""

import math

import torch

from glassformer.doctor.probes.training import own_loss
from glassformer.doctor.subject.subject import Subject
from glassformer.finding import Finding


def overfits_one_batch(subject: Subject, steps: int = 200) -> Finding:
    """Adam on one batch of random tokens: the loss must fall by nine tenths. Slow; asked for with `deep`."""
    id = "dead_gradient/overfit"
    if subject.module is None or not subject.vocabulary_logits or subject.kind == "encoder":
        return Finding.skip(id, "needs a module that predicts tokens")
    with subject.isolated(train=True, own=True) as isolated, torch.enable_grad():
        assert isolated.module is not None
        optimiser = torch.optim.Adam([p for p in isolated.module.parameters() if p.requires_grad], lr=3e-3)
        tokens = isolated.tokens(4, isolated.length(16), seed=35)
        first = last = 0.0
        for step in range(steps):
            loss = own_loss(isolated.logits(tokens), tokens, 1)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            last = float(loss.detach())
            first = last if step == 0 else first
    remedy = "It cannot learn 4 rows by heart: look for a detached path, a wrong target, a frozen parameter."
    return Finding.judge(id, last, 0.1 * first, f"{steps} steps on one batch, from {first:.3g}", remedy)


def below_entropy(subject: Subject, steps: int = 150) -> Finding:
    """Train on random tokens, fresh each step: no honest model gets below ln V, a leak that no mask test sees does."""
    id = "causal_leak/below-entropy"
    if subject.module is None or not subject.vocabulary_logits or subject.kind != "decoder":
        return Finding.skip(id, "needs a module that predicts the next token")
    with subject.isolated(train=True, own=True) as isolated, torch.enable_grad():
        assert isolated.module is not None
        optimiser = torch.optim.Adam([p for p in isolated.module.parameters() if p.requires_grad], lr=3e-3)
        losses = []
        for step in range(steps):
            tokens = torch.randint(
                0, subject.vocab_size, (8, isolated.length(24)), generator=torch.Generator().manual_seed(step)
            )
            loss = own_loss(isolated.logits(tokens), tokens, 1)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(float(loss.detach()))
    entropy, n = math.log(subject.vocab_size), 8 * (subject.length(24) - 1)
    mean = sum(losses[-20:]) / 20
    # an honest loss is at least the source's entropy in expectation; 20 fresh batches scatter by less than this
    low = entropy - 5 * entropy / math.sqrt(20 * n)
    return Finding.within(
        id, mean, low, None, f"the source has entropy ln V = {entropy:.4g}", "The model knows the next token."
    )
