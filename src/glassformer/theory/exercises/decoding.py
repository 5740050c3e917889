"""Exercises about decoding: greedy decoding, beam search, sampling with given random numbers."""

from typing import Any

import numpy as np

from glassformer.theory.exercises.exercise import Arguments, Array, exercise


def next_logits(model: dict[str, Array], tokens: list[int]) -> Array:
    """Return the logits (V) of the token that follows these tokens."""
    state = np.zeros(len(model["mix"]))
    for token in tokens:
        state = np.tanh(model["mix"] @ state + model["embed"][token])
    return model["out"] @ state


def _model(rng: np.random.Generator, V: int, D: int) -> dict[str, Array]:
    mix, _ = np.linalg.qr(rng.normal(size=(D, D)))  # keeps a long memory
    return {"embed": rng.normal(size=(V, D)), "mix": 1.2 * mix, "out": rng.normal(size=(V, D))}


def greedy(model: dict[str, Array], prompt: list[int], n: int, stop: int) -> list[int]:
    """Return the list of new tokens, at most n."""
    tokens = list(prompt)
    for _ in range(n):
        token = int(np.argmax(next_logits(model, tokens)))
        tokens.append(token)
        if token == stop:
            break
    return tokens[len(prompt) :]


def _greedy_case(rng: np.random.Generator, V: int, n: int, stops: bool = False) -> Arguments:
    while True:
        model, prompt = _model(rng, V, 6), [int(t) for t in rng.integers(0, V, 3)]
        new = greedy(model, prompt, n, -1)
        fresh = [t for t in range(2, n - 1) if new[t] not in new[:t]]
        if len(set(new)) >= 4 and fresh:  # a text that moves, and a token to stop at
            return {"model": model, "prompt": prompt, "n": n, "stop": new[fresh[0]] if stops else V}


GREEDY = exercise("greedy-decoding", solve=greedy, draw=_greedy_case)


def beam_search(model: dict[str, Array], prompt: list[int], n: int, beams: int) -> tuple[list[int], float]:
    """Return (tokens, total): the best n new tokens, their log-probability."""
    running: list[Any] = [([], 0.0)]
    for _ in range(n):
        candidates = []
        for new, total in running:
            logits = next_logits(model, prompt + new)
            logp = logits - logits.max()
            logp = logp - np.log(np.exp(logp).sum())
            candidates += [([*new, v], total + logp[v]) for v in range(len(logp))]
        candidates.sort(key=lambda beam: -beam[1])
        running = candidates[:beams]
    return running[0]


def _beam_case(rng: np.random.Generator, V: int, n: int, beams: int, differs: bool = False) -> Arguments:
    while True:
        model, prompt = _model(rng, V, 5), [int(t) for t in rng.integers(0, V, 2)]
        found = [beam_search(model, prompt, n, width) for width in (1, beams)]
        if not differs or found[1][1] > found[0][1] + 0.01:  # a text that greedy decoding does not find
            return {"model": model, "prompt": prompt, "n": n, "beams": beams}


BEAM = exercise("beam-search", solve=beam_search, draw=_beam_case)


def sample(model: dict[str, Array], prompt: list[int], uniforms: list[float], tau: float) -> list[int]:
    """Return one new token for each number in uniforms."""
    tokens = list(prompt)
    for u in uniforms:
        logits = next_logits(model, tokens) / tau
        p = np.exp(logits - logits.max())
        p = p / p.sum()
        tokens.append(int(np.searchsorted(np.cumsum(p), u)))
    return tokens[len(prompt) :]


def _sample_case(rng: np.random.Generator, V: int, n: int, tau: float) -> Arguments:
    while True:
        arguments: Arguments = {
            "model": _model(rng, V, 6),
            "prompt": [int(t) for t in rng.integers(0, V, 3)],
            "uniforms": [float(u) for u in rng.uniform(0.02, 0.98, n)],
            "tau": tau,
        }
        if len(set(sample(**arguments))) >= 4:
            return arguments


SAMPLE = exercise("nano-generate", solve=sample, draw=_sample_case)
