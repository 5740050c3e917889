"""Generation: cached equals recomputed, a row equals itself alone, seeds and stops do what they say."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import glassformer as gf
from glassformer import config as c
from glassformer.config import ConfigError
from glassformer.generation import Sampling, generate, loop, stream
from glassformer.generation.loop import Steps
from glassformer.generation.request import GenerationRequest
from glassformer.generation.state import TorchState
from glassformer.model import build
from tests import variants
from tests.variants import decoder, lively, seq2seq

RAGGED = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7], [9, 3]]
LIVELY = Sampling(temperature=1.2, top_k=20, top_p=0.95)


def long(config):
    return c.replace(config, max_len=128)


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", variants.POSITIONS)
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("n", [16, pytest.param(100, marks=pytest.mark.slow)])
def test_cached_tokens_equal_recomputation(name, window, n):
    """Every position scheme, every kind of cache, greedy and sampled."""
    # an untied head: a tied one with random weights repeats its input
    config = decoder(position=variants.POSITIONS[name], window=window, head=c.Head(tied=False))
    model, _ = lively(long(config), std=0.5)
    prompts = [[3, 1, 4], [1, 5, 9]]
    for sampling in (None, LIVELY):
        full = generate(model, prompts, n, sampling=sampling, cache=False)
        assert [len(row) for row in full.new] == [n, n]
        if sampling is not None:  # greedy may fall into a cycle, which any cache would reproduce; this does not
            assert len(set(full.new[0])) > min(10, n // 4)
        for kind in ("growing", "static", *(["windowed"] if window else [])):
            assert generate(model, prompts, n, sampling=sampling, cache=kind) == full, kind


@settings(max_examples=8)
@given(
    config=variants.decoders,
    sampling=st.sampled_from([None, LIVELY, Sampling(repetition_penalty=1.3)]),
    beams=st.sampled_from([1, 3]),
)
def test_each_row_of_a_ragged_batch_equals_the_row_alone(config, sampling, beams):
    if beams > 1 and sampling is LIVELY:
        sampling = None
    model, _ = lively(config)
    together = generate(model, RAGGED, 15, sampling=sampling, beams=beams, seed=5)
    alone = [generate(model, [row], 15, sampling=sampling, beams=beams, seed=5)[0] for row in RAGGED]
    assert together == alone


@pytest.mark.sample(3)
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("cache", [True, False, "growing"])
def test_seq2seq_rows_equal_the_row_alone(beams, cache):
    model, _ = lively(seq2seq())
    together = generate(model, RAGGED, 15, beams=beams, cache=cache)
    assert together == [generate(model, [row], 15, beams=beams, cache=not cache)[0] for row in RAGGED]
    assert all(row[0] == 3 for row in together)  # the start token


def test_the_same_row_has_the_same_draws_wherever_it_stands():
    model, _ = lively(decoder())
    out = generate(model, [[1, 2], [5], [1, 2]], 15, sampling=LIVELY, seed=3)
    assert out[0] == out[2]
    other = generate(model, [[1, 2], [5], [1, 2]], 15, sampling=LIVELY, seed=[3, 3, 4])
    assert other[:2] == out[:2]
    assert other[2] != out[2]
    assert generate(model, [[1, 2]], 15, sampling=LIVELY, seed=4)[0] == other[2]


def test_only_sampling_draws_numbers(monkeypatch):
    model, _ = lively(decoder())
    drawn = "glassformer.generation.loop.uniforms"
    monkeypatch.setattr(drawn, lambda *arguments: pytest.fail("numbers were drawn"))
    generate(model, [[1, 2]], 2)
    with pytest.raises(pytest.fail.Exception):
        generate(model, [[1, 2]], 2, Sampling())


def test_the_prompt_is_read_before_numbers_are_drawn(monkeypatch):
    """A GPU reads it meanwhile. The same for the tokens that a penalty on repetition needs."""
    order = []
    for holder, name in ((loop, "uniforms"), (loop, "_seen"), (TorchState, "start")):
        called = getattr(holder, name)
        monkeypatch.setattr(holder, name, lambda *a, name=name, called=called: (order.append(name), called(*a))[1])
    model, _ = lively(decoder())
    generate(model, [[1, 2]], 3, Sampling(repetition_penalty=1.3))
    assert order == ["start", "uniforms", "_seen"]


def test_prefill_in_chunks_changes_nothing():
    model, _ = lively(decoder())
    whole = generate(model, RAGGED, 10)
    for chunk in (1, 3, 8, 50):
        assert generate(model, RAGGED, 10, prefill_chunk=chunk) == whole


def test_stream_yields_what_generate_collects():
    model, _ = lively(decoder())
    out = generate(model, RAGGED, 12, sampling=LIVELY, stop=[4])
    rows = [[] for _ in RAGGED]
    for gained in stream(model, RAGGED, 12, sampling=LIVELY, stop=[4]):
        for row, token in zip(rows, gained, strict=True):
            if token is not None:
                row.append(token)
    assert rows == out.new


def test_stream_stops_when_the_caller_does():
    model, _ = lively(decoder())
    steps = stream(model, [[1]], 20)
    first = next(steps)
    steps.close()
    assert first == [generate(model, [[1]], 1).new[0][0]]


class Script(torch.nn.Module):
    """Stands in for the head: row by row, the tokens to be produced, whatever the input."""

    def __init__(self, rows, vocab):
        super().__init__()
        self.rows, self.vocab, self.step = rows, vocab, 0

    def forward(self, hidden, table):
        logits = torch.zeros(hidden.shape[0], 1, self.vocab, dtype=hidden.dtype)
        for i, row in enumerate(self.rows):
            logits[i, 0, row[self.step]] = 9
        self.step += 1
        return logits


def scripted(*rows):
    model = build(decoder())
    model.head = Script(rows, variants.V)
    return model


def test_stop_sequence_is_found_after_a_false_start():
    """The stream a, a, b contains [a, b]: a matcher that restarts from scratch at the second a misses it."""
    out = generate(scripted([8, 8, 9, 4], [8, 4, 9, 4]), [[1], [1, 2]], 4, stop=[[8, 9]])
    assert out.new == [[8, 8, 9], [8, 4, 9, 4]]
    assert out.finished == ["stop", "length"]


def test_stop_does_not_match_the_prompt():
    out = generate(scripted([9, 5, 8, 9]), [[8]], 4, stop=[[8, 9]])
    assert out.new == [[9, 5, 8, 9]]


def test_stop_defaults_to_the_end_of_text_ids():
    model = scripted([5, 7, 5, 5])
    model.config = c.replace(model.config, special=c.Special(eos=(7,)))
    assert generate(model, [[1]], 4).new == [[5, 7]]
    model.head.step = 0
    assert generate(model, [[1]], 4, stop=[]).new == [[5, 7, 5, 5]]


@pytest.mark.parametrize("config", [decoder(dropout=0.5), seq2seq(dropout=0.5)], ids=["decoder", "seq2seq"])
@pytest.mark.parametrize("beams", [1, 2])
def test_generation_leaves_the_model_as_it_was(config, beams):
    model, _ = lively(config)
    quiet = generate(model, [[1, 2]], 10, beams=beams)
    model.train()
    assert generate(model, [[1, 2]], 10, beams=beams) == quiet  # no dropout while generating
    assert model.training
    assert torch.is_grad_enabled()


def test_public_name_is_the_function():
    model, _ = lively(decoder())
    assert gf.generate(model, [[1]], 3) == generate(model, [[1]], 3)
    assert gf.generate(model, torch.tensor([[1, 2], [3, 4]]), 3) == generate(model, [[1, 2], [3, 4]], 3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompts": []}, "no prompt"),
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"prompts": [[1, 31]]}, "prompt 0 has token id 31: ids go from 0 to 30"),
        ({"prompts": [[-1]]}, "token id -1"),
        ({"prompts": [[0.5]]}, "contains 0.5, of type float: token ids are whole numbers"),
        ({"prompts": [[1.0]]}, "contains 1.0, of type float"),
        ({"prompts": [[True]]}, "has token id True"),
        ({"prompts": [["a", "b"]]}, "contains 'a', of type str"),
        ({"prompts": [[1], "b"]}, "prompt 1 is 'b': pass a list of token ids"),
        ({"prompts": [None]}, "prompt 0 is None"),
        ({"prompts": None}, "of type NoneType: pass a list of lists"),
        ({"prompts": 5}, "of type int: pass a list of lists"),
        ({"prompts": b"abc"}, "of type bytes: pass a list of lists"),
        ({"prompts": {"a": 1}}, "of type dict: pass a list of lists"),
        ({"prompts": "hello"}, "'hello' is text, and the model carries no tokenizer"),
        ({"prompts": ["hello " * 20, "b"]}, "hello hel….*carries no tokenizer"),
        ({"prompts": [1, 2]}, r"wrap a single prompt as \[prompt\]"),
        ({"prompts": torch.tensor([1, 2])}, r"shape \(2,\): it must be \(batch, length\)"),
        ({"prompts": torch.zeros(1, 2, 3).long()}, r"shape \(1, 2, 3\): it must be \(batch, length\)"),
        ({"prompts": torch.zeros(1, 2)}, "dtype float32: token ids are whole numbers"),
        ({"prompts": torch.zeros(1, 2).bool()}, "dtype bool: token ids are whole numbers"),
        ({"prompts": np.zeros((1, 2))}, "dtype float64: token ids are whole numbers"),
        ({"prompts": [torch.zeros(1, 2).long()]}, r"prompt 0 has shape \(1, 2\)"),
        ({"prompts": [torch.zeros(2)]}, "contains 0.0, of type float"),
        ({"prompts": [[1] * 29]}, "a prompt of 29 tokens fills the context of 29"),
        ({"prompts": [[1] * 20]}, "ask for 9 new tokens or fewer"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"beams": 0}, "beams=0"),
        ({"beams": 2, "sampling": Sampling(top_k=3)}, "does not sample: drop top_k"),
        ({"beams": 2, "sampling": Sampling(temperature=0.5)}, "drop temperature=0.5"),
        ({"seed": [1, 2]}, "2 seeds for 1 prompt: give one number"),
        ({"stop": [[]]}, "a stop sequence is empty"),
        ({"prefill_chunk": 0}, "prefill_chunk=0"),
    ],
)
def test_bad_input_is_refused_in_words(arguments, words):
    with pytest.raises(ValueError, match=words):
        generate(**{"model": build(decoder()), "prompts": [[1]], "max_new_tokens": 10, **arguments})


def test_arrays_and_tensors_of_any_whole_number_dtype_are_prompts():
    model, _ = lively(decoder())
    wanted = generate(model, [[1, 2]], 3)
    given = [torch.tensor([[1, 2]], dtype=torch.int32), np.array([[1, 2]]), np.array([[1, 2]], np.uint8)]
    given += [[torch.tensor([1, 2])], [np.array([1, 2])], [[torch.tensor(1), np.int64(2)]], [(1, 2)], ((1, 2),)]
    for prompts in given:
        assert generate(model, prompts, 3) == wanted


def test_a_text_is_encoded_by_the_tokenizer_of_the_models_folder():
    model, tokenizer = gf.load("bard"), gf.load_tokenizer("bard")
    wanted = generate(model, [tokenizer.encode("ROMEO:").ids], 8)
    for prompts in ("ROMEO:", ["ROMEO:"]):
        found = generate(model, prompts, 8)
        assert found == wanted
        assert found.texts == [tokenizer.decode(wanted[0])]
    with pytest.raises(ValueError, match="decode the result with your own tokenizer"):
        wanted.texts  # noqa: B018
    with pytest.raises(ValueError, match="'½'"):
        generate(model, "½", 8)
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        generate(model, ["a", ""], 8)


def test_an_encoder_cannot_generate():
    spec = decoder()
    encoder = c.EncoderConfig(
        vocab_size=spec.vocab_size,
        d_model=14,
        n_layers=1,
        attention=spec.attention,
        feedforward=spec.feedforward,
        max_len=9,
    )
    with pytest.raises(ValueError, match="cannot generate"):
        generate(build(encoder), [[1]], 2)


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(), Sampling(top_k=3)])
@pytest.mark.parametrize("wrong", ["one", "all"])
def test_logits_that_are_not_finite_are_refused(sampling, wrong):
    model = lively(decoder(head=c.Head(tied=False)))[0]
    with torch.no_grad():
        (model.head.weight[5] if wrong == "one" else model.head.weight).fill_(float("nan"))
    with pytest.raises(ConfigError, match="not all numbers"):
        generate(model, [[1, 2, 3]], 4, sampling)


def test_a_generation_may_begin_in_inference_mode_and_continue_outside():
    model = lively(decoder())[0]
    wanted = list(stream(model, [[1, 2, 3]], 6, stop=[], engine="torch"))
    with torch.inference_mode():
        running = stream(model, [[1, 2, 3]], 6, stop=[], engine="torch")
        found = [next(running), next(running)]
    assert [*found, *running] == wanted


class Counting:
    """A decode state that chooses its tokens itself, 1, 2, 3, ...; `log` is what it was asked for, in order."""

    owns_threads = False

    def __init__(self, model):
        self.model, self.modules, self.prompts, self.log, self.last = model, list(model.modules()), [[5]], [], 0

    def start(self):
        return torch.eye(100)[[1]]

    def begin(self, tokens, count, choose):
        assert choose is None
        first = 1 + (self.last if tokens is None else int(tokens))
        self.last = first + count - 1
        self.log.append(f"begin {first}+{count}")

        def collect():
            self.log.append(f"collect {first}+{count}")
            return [[first + i] for i in range(count)]

        return collect


def steps_of(stops=(), most=16):
    state = Counting(build(decoder(vocab_size=100)))
    request = GenerationRequest([[5]], most, stops=stops)
    return Steps(state, request, None), state.log


def test_the_next_steps_begin_before_the_last_ones_are_known():
    steps, log = steps_of()
    assert [next(steps) for _ in range(3)] == [[1], [2], [3]]
    assert log == ["begin 2+1", "begin 3+2", "collect 2+1", "begin 5+4", "collect 3+2", "begin 9+8"]
    assert [token for (token,) in steps] == list(range(4, 17))
    assert log[6:] == ["collect 5+4", "collect 9+8"]


def test_runs_are_no_longer_than_the_longest(monkeypatch):
    monkeypatch.setattr(loop, "LONGEST_RUN", 3)
    steps, log = steps_of(most=12)
    assert [token for (token,) in steps] == list(range(1, 13))
    assert [entry for entry in log if "begin" in entry] == [f"begin {n}" for n in ("2+1", "3+2", "5+3", "8+3", "11+2")]


def test_no_steps_begin_after_a_stop_or_the_last_token():
    steps, log = steps_of(stops=([6],))
    assert [token for (token,) in steps] == [1, 2, 3, 4, 5, 6]
    assert log[-2:] == ["begin 9+8", "collect 5+4"]
    assert not steps.begun
    steps, _ = steps_of(most=7)
    assert len(list(steps)) == 7


def test_no_step_follows_a_closed_generation():
    steps, log = steps_of()
    assert [next(steps) for _ in range(3)][-1] == [3]
    steps.close()
    assert list(steps) == []
    assert log[-1] == "begin 9+8"
