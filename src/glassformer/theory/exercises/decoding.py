"""Exercises about decoding: greedy decoding, beam search, sampling with given random numbers."""

from typing import Any

import numpy as np

from glassformer.theory.exercises.exercise import Array, Case, Exercise, Mistake


def next_logits(model: dict[str, Array], tokens: list[int]) -> Array:
    """Return the logits (V) of the token that follows these tokens."""
    state = np.zeros(len(model["mix"]))
    for token in tokens:
        state = np.tanh(model["mix"] @ state + model["embed"][token])
    return model["out"] @ state


def _model(rng: np.random.Generator, V: int, D: int) -> dict[str, Array]:
    mix, _ = np.linalg.qr(rng.normal(size=(D, D)))  # keeps a long memory
    return {"embed": rng.normal(size=(V, D)), "mix": 1.2 * mix, "out": rng.normal(size=(V, D))}


MODEL = (
    "The model is given: next_logits(model, tokens) returns the logits (V) of the next token after a list of tokens."
)


def greedy(model: dict[str, Array], prompt: list[int], n: int, stop: int) -> list[int]:
    """Return the list of new tokens, at most n."""
    tokens = list(prompt)
    for _ in range(n):
        token = int(np.argmax(next_logits(model, tokens)))
        tokens.append(token)
        if token == stop:
            break
    return tokens[len(prompt) :]


def _greedy_cases(rng: np.random.Generator) -> list[Case]:
    def made(label: str, V: int, n: int, stops: bool, hint: str = "") -> Case:
        while True:
            model, prompt = _model(rng, V, 6), [int(t) for t in rng.integers(0, V, 3)]
            new = greedy(model, prompt, n, -1)
            fresh = [t for t in range(2, n - 1) if new[t] not in new[:t]]
            if len(set(new)) >= 4 and fresh:  # a text that moves, and a token to stop at
                stop = new[fresh[0]] if stops else V
                return Case(label, {"model": model, "prompt": prompt, "n": n, "stop": stop}, hint)

    return [
        made("8 new tokens", 9, 8, False),
        made("a stop token that comes early", 9, 10, True, "the stop token ends the text and is its last token"),
        made("6 new tokens of 12", 12, 6, False),
    ]


GREEDY = Exercise(
    id="greedy-decoding",
    title="Greedy decoding",
    problem=f"""\
Continue a prompt greedily: always append the most likely next token. {MODEL}

  model       the arrays of the model
  prompt      a list of tokens
  n           the largest number of new tokens
  stop        the token that ends the text

Stop after n new tokens, or after the token `stop`, which is part of the result. Return the new tokens as a list,
without the prompt. Do not modify the prompt.""",
    solve=greedy,
    cases=_greedy_cases,
    returns=("tokens",),
    mistakes=(
        Mistake(
            "you return the prompt too: return only the new tokens",
            {"return tokens[len(prompt) :]": "return tokens"},
        ),
        Mistake(
            "you ignore the stop token: end the loop after it", {"        if token == stop:\n            break\n": ""}
        ),
        Mistake(
            "you leave out the stop token: it is the last token of the result",
            {
                "        tokens.append(token)\n": "",
                "            break\n": "            break\n        tokens.append(token)\n",
            },
        ),
        Mistake(
            "you feed only the last token to the model: it needs the whole text so far",
            {"next_logits(model, tokens)": "next_logits(model, tokens[-1:])"},
        ),
        Mistake(
            "you never feed the new tokens back: the model must see the prompt and all new tokens",
            {"next_logits(model, tokens)": "next_logits(model, prompt)"},
        ),
        Mistake("you take the least likely token: take the argmax", {"np.argmax": "np.argmin"}),
        Mistake("you make one token too many: at most n", {"range(n)": "range(n + 1)"}),
        Mistake("you make one token too few: n, if the stop token does not come", {"range(n)": "range(n - 1)"}),
    ),
    claims=("decoding-samplers", "greedy-vs-best"),
    sources=("Ch. 13 ex. 16",),
    whole=True,
    given=("next_logits",),
)


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


def _beam_cases(rng: np.random.Generator) -> list[Case]:
    def made(label: str, V: int, n: int, beams: int, differs: bool) -> Case:
        while True:
            model, prompt = _model(rng, V, 5), [int(t) for t in rng.integers(0, V, 2)]
            found = [beam_search(model, prompt, n, width) for width in (1, beams)]
            if not differs or found[1][1] > found[0][1] + 0.01:  # a text that greedy decoding does not find
                return Case(label, {"model": model, "prompt": prompt, "n": n, "beams": beams})

    return [
        made("3 beams, 4 new tokens", 6, 4, 3, True),
        made("4 beams, 5 new tokens", 5, 5, 4, True),
        made("one beam, which is greedy decoding", 6, 4, 1, False),
        made("one new token", 7, 1, 3, False),
    ]


BEAM = Exercise(
    id="beam-search",
    title="Beam search",
    problem=f"""\
Search for a likely continuation with several beams. {MODEL}

Start with the prompt. In each of n steps, extend every running beam by every token of the vocabulary, and keep the
`beams` candidates with the largest total log-probability of their new tokens, whichever beam they come from. The
log-probability of a token is its logit minus the logarithm of the sum of exp(logit).

Return the new tokens (n) of the best beam and its total log-probability. Do not modify the prompt.""",
    solve=beam_search,
    cases=_beam_cases,
    returns=("tokens", "total"),
    mistakes=(
        Mistake(
            "you add up logits: subtract log Σ exp(logit) first, or beams cannot be compared",
            {"            logp = logp - np.log(np.exp(logp).sum())\n": "", "logits - logits.max()": "logits"},
        ),
        Mistake("you add up probabilities: add up their logarithms", {"total + logp[v]": "total + np.exp(logp[v])"}),
        Mistake(
            "you keep one candidate per step, which is greedy decoding: keep `beams` of them",
            {"candidates[:beams]": "candidates[:1]"},
        ),
        Mistake("you keep the least likely candidates: sort by decreasing log-probability", {"-beam[1]": "beam[1]"}),
        Mistake(
            "you rank candidates by their last token alone: rank by the total log-probability",
            {"total + logp[v]) for": "logp[v]) for"},
        ),
        Mistake(
            "you leave the prompt out of the model's input: it sees prompt + new tokens",
            {"prompt + new": "prompt[-1:] + new"},
        ),
        Mistake(
            "you divide the total by the number of tokens: return the total",
            {"return running[0]": "return running[0][0], running[0][1] / n"},
        ),
        Mistake(
            "you return the prompt too: return only the new tokens",
            {"return running[0]": "return prompt + running[0][0], running[0][1]"},
        ),
    ),
    claims=("greedy-vs-best", "decoding-samplers"),
    sources=("Ch. 13 ex. 16",),
    given=("next_logits",),
)


def sample(model: dict[str, Array], prompt: list[int], uniforms: list[float], tau: float) -> list[int]:
    """Return one new token for each number in uniforms."""
    tokens = list(prompt)
    for u in uniforms:
        logits = next_logits(model, tokens) / tau
        p = np.exp(logits - logits.max())
        p = p / p.sum()
        tokens.append(int(np.searchsorted(np.cumsum(p), u)))
    return tokens[len(prompt) :]


def _sample_cases(rng: np.random.Generator) -> list[Case]:
    def made(label: str, V: int, n: int, tau: float) -> Case:
        while True:
            arguments: dict[str, Any] = {
                "model": _model(rng, V, 6),
                "prompt": [int(t) for t in rng.integers(0, V, 3)],
                "uniforms": [float(u) for u in rng.uniform(0.02, 0.98, n)],
                "tau": tau,
            }
            if len(set(sample(**arguments))) >= 4:
                return Case(label, arguments)

    return [
        made("12 tokens at temperature 1", 8, 12, 1.0),
        made("temperature 2", 9, 15, 2.0),
        made("temperature 0.5", 11, 15, 0.5),
    ]


SAMPLE = Exercise(
    id="nano-generate",
    title="nanoGPT, stage 8: generating a text",
    problem=f"""\
Draw a continuation token by token. {MODEL}

  prompt      a list of tokens
  uniforms    numbers between 0 and 1, one for each new token, in the place of a random generator
  tau         the temperature: probabilities are softmax(logits / tau)

For each number u, the new token is the first whose cumulative probability (in the order of the token ids, including the
token itself) is at least u. Append it, and go on with the longer text. Return the new tokens as a list.""",
    solve=sample,
    cases=_sample_cases,
    returns=("tokens",),
    mistakes=(
        Mistake("you multiply the logits by tau: divide by it", {"/ tau": "* tau"}),
        Mistake("you ignore the temperature: divide the logits by tau", {" / tau": ""}),
        Mistake(
            "you never feed the new tokens back: the model must see the prompt and all new tokens",
            {"next_logits(model, tokens)": "next_logits(model, prompt)"},
        ),
        Mistake(
            "you feed only the last token to the model: it needs the whole text so far",
            {"next_logits(model, tokens)": "next_logits(model, tokens[-1:])"},
        ),
        Mistake(
            "you take the most likely token: that is greedy decoding, and u is not used",
            {"np.searchsorted(np.cumsum(p), u)": "np.argmax(p)"},
        ),
        Mistake(
            "your tokens are one too small: take the token that crosses u, not the one before",
            {"np.searchsorted(np.cumsum(p), u)": "max(np.searchsorted(np.cumsum(p), u) - 1, 0)"},
        ),
        Mistake(
            "you return the prompt too: return only the new tokens",
            {"return tokens[len(prompt) :]": "return tokens"},
        ),
        Mistake(
            "you use the first random number for every token: each token has its own",
            {"np.cumsum(p), u)": "np.cumsum(p), uniforms[0])"},
        ),
    ),
    claims=("train-nano-gpt", "decoding-samplers"),
    sources=("Ch. 13 ex. 20",),
    whole=True,
    given=("next_logits",),
)
