"""The decoders against an enumeration of all texts, and each other."""

import itertools

import numpy as np

from glassformer.theory.exercises import decoding as module

RNG = np.random.default_rng(2)


def log_probability(model, prompt, new):
    total = 0.0
    for n, token in enumerate(new):
        z = module.next_logits(model, [*prompt, *new[:n]])
        total += z[token] - np.log(np.exp(z).sum())
    return total


def test_one_beam_is_greedy_decoding():
    model = module._model(RNG, 6, 5)
    tokens, total = module.beam_search(model, [1, 2], 5, 1)
    assert tokens == module.greedy(model, [1, 2], 5, -1)
    assert np.isclose(total, log_probability(model, [1, 2], tokens))


def test_enough_beams_find_the_most_likely_text():
    for _ in range(5):
        model = module._model(RNG, 4, 5)
        texts = [list(text) for text in itertools.product(range(4), repeat=3)]
        best = max(texts, key=lambda text: log_probability(model, [0], text))
        tokens, total = module.beam_search(model, [0], 3, 16)
        assert tokens == best
        assert np.isclose(total, log_probability(model, [0], best))


def test_cases_are_those_where_greedy_decoding_misses_the_best_text():
    first = module.BEAM.cases(RNG)[0].arguments
    assert module.beam_search(**first)[0] != module.beam_search(**{**first, "beams": 1})[0]


def test_sampled_tokens_have_the_probabilities_of_the_model():
    model = module._model(RNG, 5, 4)
    grid = (np.arange(2000) + 0.5) / 2000
    drawn = [module.sample(model, [3], [float(u)], 1.5)[0] for u in grid]
    z = module.next_logits(model, [3]) / 1.5
    p = np.exp(z) / np.exp(z).sum()
    assert np.allclose(np.bincount(drawn, minlength=5) / 2000, p, atol=1e-3)


def test_a_stop_token_ends_the_text():
    case = module.GREEDY.cases(RNG)[1].arguments
    new = module.greedy(**case)
    assert new[-1] == case["stop"]
    assert len(new) < case["n"]
