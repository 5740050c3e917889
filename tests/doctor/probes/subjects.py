"""Subjects for these tests: small healthy models, and the zoo's buggy ones by their id."""

import functools

import torch
from torch import nn

import glassformer as gf
from glassformer.doctor.probes import Subject, subject_of
from glassformer.finding import Finding, Verdict
from tests.bugs.zoo import ZOO

BUGS = {bug.id: bug for bug in ZOO}
SMALL = {"vocab_size": 61, "n_layers": 2, "d_model": 32, "n_heads": 4, "d_ff": 48}


def warmed(model: nn.Module, **given) -> Subject:
    subject = subject_of(model, **given)
    subject.warmth = 6.0
    return subject


@functools.cache
def gpt2() -> Subject:
    return warmed(gf.build(gf.presets.gpt2(**SMALL, max_len=80), seed=0))


@functools.cache
def rotary() -> Subject:
    config = gf.presets.nano(vocab_size=61, n_layers=2, d_model=32, n_heads=4, d_ff=48, max_len=80)
    return warmed(gf.build(gf.config.replace(config, position=gf.config.Rotary()), seed=0))


@functools.cache
def bert() -> Subject:
    return warmed(gf.build(gf.presets.bert_base(**SMALL, max_len=80), seed=0))


@functools.cache
def t5() -> Subject:
    config = gf.presets.t5_small(
        vocab_size=61, n_layers=2, n_encoder_layers=2, d_model=32, n_heads=4, d_ff=48, max_len=80
    )
    return warmed(gf.build(config, seed=0))


def buggy(id: str) -> Subject:
    bug = BUGS[id]
    return warmed(bug.build(), kind=bug.kind, expect=dict(bug.expect))


def sound(id: str) -> Subject:
    """The same model without the bug."""
    bug = BUGS[id]
    return warmed(bug.healthy(), kind=bug.kind, expect=dict(bug.expect))


def listed(result) -> list[Finding]:
    return [result] if isinstance(result, Finding) else list(result)


def failures(result) -> list[str]:
    return [f.id for f in listed(result) if f.verdict is Verdict.FAIL]


def names(result) -> set[str]:
    return {id.split("/")[0] for id in failures(result)}


class Copycat(nn.Module):
    """Logits from an embedding alone: causal, without attention, blocks or config."""

    def __init__(self, size: int = 23):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(size, 16), nn.Linear(16, size)

    def forward(self, idx):
        return self.head(self.table(idx))
