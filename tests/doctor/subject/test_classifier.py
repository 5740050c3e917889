"""Models that return one vector for each sequence are examined as encoders."""

import pytest
import torch
from torch import nn

import glassformer as gf
from glassformer.doctor.probes import subject_of
from glassformer.doctor.subject.classifier import Tokenwise, tokenwise


class Classifier(nn.Module):
    """A token of its own in front, torch's encoder, class logits from the first position."""

    def __init__(self, bug: str | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.bug = bug
        self.emb, self.pos = nn.Embedding(61, 32, padding_idx=0), nn.Embedding(65, 32)
        self.first = nn.Parameter(0.02 * torch.randn(1, 1, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.fc, self.unused = nn.Linear(32, 5), nn.Linear(32, 5) if bug == "unused" else None

    def forward(self, input_ids, attention_mask=None):
        x = torch.cat([self.first.expand(len(input_ids), -1, -1), self.emb(input_ids)], 1)
        x = x + self.pos(torch.arange(x.shape[1]))
        hidden = None
        if attention_mask is not None and self.bug != "mask_ignored":
            hidden = nn.functional.pad(attention_mask == 0, (1, 0), value=False)
        return {"scores": self.fc(self.encoder(x, src_key_padding_mask=hidden)[:, 0])}


def test_its_output_has_the_tokens_of_the_last_module_and_the_vector():
    model, tokens = Classifier().eval(), torch.randint(1, 61, (2, 5))
    wrapped = tokenwise(model, tokens)
    assert wrapped.path == "encoder"
    out = wrapped(tokens)
    assert out.shape == (2, 5, 37)
    assert torch.equal(out[:, 3, 32:], model(tokens)["scores"])
    assert tokenwise(nn.Sequential(nn.Embedding(61, 8)), tokens) is None


def test_a_sound_classifier_is_healthy_and_named_an_encoder():
    subject = subject_of(Classifier().eval())
    assert isinstance(subject.model, Tokenwise)
    assert subject.kind == "encoder"
    report = gf.diagnose(Classifier().eval(), quick=True)
    assert report.healthy, report.text()


@pytest.mark.parametrize(("bug", "found"), [("mask_ignored", "pad_leak"), ("unused", "dead_gradient")])
def test_bugs_of_a_classifier_are_named(bug, found):
    assert [d.id for d in gf.diagnose(Classifier(bug).eval(), quick=True).diagnoses] == [found]
