"""The healthy ward is healthy: each subject is measured directly, and each note is a measured fact."""

import functools
import inspect

import pytest
import torch

from tests.bugs import healthy_transformers as hf
from tests.bugs import probes
from tests.bugs.healthy import FIRST_PRESETS, WARD, tokens_for

each = pytest.mark.parametrize("subject", WARD, ids=lambda s: s.id)
# Other shapes round differently. Measured over the ward, in parts of the largest logit: at most 1.2e-6 in float32 (warm
# weights; 5e-7 else) and 7e-3 in bfloat16. Every bug of the zoo that shows in logits moves them by more than 1e-4.
BOUND, COARSE = 2e-5, 0.05


@functools.cache
def held(id):
    """A subject's model, in evaluation mode; calls leave it as it is, so one will do for all tests."""
    model = next(subject for subject in WARD if subject.id == id).build()
    return model.eval() if isinstance(model, torch.nn.Module) else model


def ready(subject):
    return held(subject.id)


def bound(subject, logits):
    return (COARSE if logits.dtype == torch.bfloat16 else BOUND) * float(logits.abs().max())


def test_the_ward_is_large_and_covers_what_it_should():
    ids = [subject.id for subject in WARD]
    assert len(set(ids)) == len(ids)
    families = [subject.family for subject in WARD]
    assert families.count("transformers") >= 22
    assert len(ids) >= 40
    assert {f"glass-{name}" for name in FIRST_PRESETS} <= set(ids)
    assert len(FIRST_PRESETS) > 20
    assert {subject.kind for subject in WARD if subject.family == "transformers"} == {"decoder", "encoder", "seq2seq"}
    # the fifteenth trap is a real bug that makes other probes misfire: it is in the zoo
    assert {subject.trap for subject in WARD} - {None} == set(range(1, 15))


@pytest.mark.sample(40)
@each
@torch.no_grad()
def test_only_encoders_see_later_tokens_calls_repeat_and_rows_stand_alone(subject):
    model, call = ready(subject), tokens_for(subject, rows=3)
    changed = call[-1].clone()
    changed[:, 12:] = 3 + (changed[:, 12:] + 5) % (subject.vocab_size - 3)
    before, after = subject.run(model, *call), subject.run(model, *call[:-1], changed)
    assert before.shape == (3, 20, subject.vocab_size)
    assert (probes.gap(before[:, :12], after[:, :12]) == 0) == (subject.kind != "encoder")
    assert probes.gap(before[:, 12:], after[:, 12:]) > 1e-3 * float(before.abs().max())
    assert probes.gap(subject.run(model, *call), before) == 0
    alone = subject.run(model, *(tokens[1:2] for tokens in call))
    assert probes.gap(before[1:2], alone) < bound(subject, before)


def steps_hf(model, call, at):
    """Logits of the last tokens, fed through the cache in two pieces."""
    name, head = ("decoder_input_ids", {"input_ids": call[0]}) if len(call) == 2 else ("input_ids", {})
    first = model(**head, **{name: call[-1][:, :at]}, use_cache=True)
    parts, cache = [first.logits], first.past_key_values
    for place in range(at, call[-1].shape[1]):
        out = model(**head, **{name: call[-1][:, place : place + 1]}, past_key_values=cache, use_cache=True)
        parts.append(out.logits)
    return torch.cat(parts, 1)


def steps(subject, model, call, at=15):
    if subject.family == "transformers":
        return steps_hf(model, call, at)
    cache, parts = model.new_cache(), []
    for piece in (call[-1][:, :at], *call[-1][:, at:].split(1, 1)):
        out = model(*call[:-1], piece, cache=cache)
        parts.append(out if subject.family == "glassformer" else out[0])
    return torch.cat(parts, 1)


@pytest.mark.sample(40)
@pytest.mark.parametrize("subject", [s for s in WARD if s.kind != "encoder"], ids=lambda s: s.id)
@torch.no_grad()
def test_steps_through_a_cache_equal_one_pass(subject):
    model, call = ready(subject), tokens_for(subject)
    if subject.family != "transformers" and not hasattr(model, "new_cache"):
        assert subject.family == "odd"
        return  # it has no cache to be wrong
    full = subject.run(model, *call)
    assert probes.gap(steps(subject, model, call), full) < bound(subject, full)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in hf.KINDS.items() for name in names])
@torch.no_grad()
def test_left_padding_without_positions_moves_exactly_the_noted_ones(kind, name):
    model = held(f"hf-{name}")
    idx, mask = probes.rows(1, 16), probes.pads(16, [5], "left")
    idx = torch.where(mask.bool(), idx, model.config.pad_token_id)  # some models find padding by its id
    target = {"decoder_input_ids": probes.rows(1, 11, seed=3)} if kind == "seq2seq" else {}
    start = 0 if kind == "seq2seq" else 5
    given = {"input_ids": idx, "attention_mask": mask, **target}
    alone = model(input_ids=idx[:, 5:], **target).logits
    top = float(alone.abs().max())
    # measured: at most 4e-7 of the largest logit where positions are right, 1.8e-3 and more where they move
    moved = probes.gap(model(**given).logits[:, start:], alone) > 1e-4 * top
    assert moved == (name in hf.LEFT_PADDING_MOVES_POSITIONS)
    if moved and "position_ids" in inspect.signature(model.forward).parameters:
        offset = 2 if name == "mpnet" else 0  # its table starts there, as RoBERTa's does
        result = model(**given, position_ids=(mask.cumsum(1) - 1).clamp(min=0) + offset).logits[:, start:]
        assert probes.gap(result, alone) < BOUND * top


@pytest.mark.parametrize("name", hf.ENCODERS)
@torch.no_grad()
def test_right_padding_is_invisible_to_encoders(name):
    model = held(f"hf-{name}")
    idx, mask = probes.rows(1, 16), probes.pads(16, [5], "right")
    padded = model(input_ids=torch.where(mask.bool(), idx, 0), attention_mask=mask).logits[:, :11]
    alone = model(input_ids=idx[:, :11], attention_mask=torch.ones(1, 11)).logits
    assert probes.gap(padded, alone) < BOUND * float(alone.abs().max())


def test_the_trained_subject_is_trained():
    model = held("odd-trained")
    with torch.no_grad():
        assert float(model.loss((5 + 3 * torch.arange(24))[None] % 97)) < 1.0
