"""Playground view: tokens, the next-token distribution, generated text, and the tree of a beam search."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from glassformer.studio import schema
from glassformer.studio.api.inputs import target_of
from glassformer.studio.encoding import TensorResponse
from glassformer.studio.errors import StudioError
from glassformer.studio.events import Emit
from glassformer.studio.jobs import check_cancelled
from glassformer.studio.models import LoadedModel, ModelStore

if TYPE_CHECKING:
    from torch import Tensor

    from glassformer.generation import Sampling
    from glassformer.generation.state import TorchState


def tokens(models: ModelStore, request: schema.Tokens) -> dict[str, Any]:
    """Return ids, token texts and character offsets of a text; for an encoder-decoder also the decoder's input."""
    loaded = models.get(request.model)
    if request.ids is not None:
        found = {**_token_list(loaded, loaded.check_ids(request.ids)), "text": loaded.decode(request.ids)}
    else:
        text = request.text or ""
        ids = loaded.encode(text) if text else []
        offsets = [list(pair) for pair in loaded.tokenizer.encode(text).offsets] if ids else []
        found = {**_token_list(loaded, ids), "offsets": offsets, "text": text}
    given = _given_target(loaded, request)
    target = target_of(loaded, found["ids"], given) if found["ids"] or given is not None else None
    if target is None:
        return found
    return {**found, "target": {**_token_list(loaded, target), "text": loaded.decode(target[1:])}}


def _token_list(loaded: LoadedModel, ids: list[int]) -> dict[str, Any]:
    return {"ids": ids, "pieces": [loaded.token_text(i) for i in ids]}


def _given_target(loaded: LoadedModel, request: schema.Tokens) -> list[int] | None:
    """Return the decoder's input of a request; the start token is added to a text, an end token is not."""
    if not request.target_text:
        return request.target
    if loaded.tokenizer is None:
        raise StudioError(f"{loaded.name} has no tokenizer.json next to its weights: give target as token ids.")
    start = loaded.config.special.start
    ids = loaded.tokenizer.encode(request.target_text, add_special_tokens=False).ids
    return ([] if start is None else [start]) + ids


def vocabulary(models: ModelStore, request: schema.ModelRequest) -> dict[str, Any]:
    """Return the text of every token."""
    return {"pieces": models.get(request.model).vocabulary()}


def next_token(models: ModelStore, request: schema.Next) -> dict[str, Any]:
    """Return the next-token distribution: `raw` is the model's, `p` the one after the sampling parameters."""
    import torch

    from glassformer.generation import distribution

    loaded, logits = _next_logits(models, request)
    raw, sampled = logits.double().softmax(-1), distribution(logits[None], sampling_of(request))[0]
    # Sorted by the model's own probability, so that tokens excluded by sampling are shown next to the others.
    best = logits.topk(min(request.count, len(logits))).indices.tolist()
    rows = [
        {
            "id": i,
            "piece": loaded.token_text(i),
            "logit": float(logits[i]),
            "raw": float(raw[i]),
            "p": float(sampled[i]),
            "kept": bool(sampled[i] > 0),
        }
        for i in best
    ]
    entropy = float(torch.special.entr(sampled).sum())
    return {"top": rows, "entropy": entropy, "kept": int((sampled > 0).sum()), "vocab": len(logits)}


def next_logits(models: ModelStore, request: schema.Next) -> TensorResponse:
    """Return all logits, so that the page can apply sampling parameters without another request."""
    loaded, logits = _next_logits(models, request)
    return TensorResponse({"logits": (logits, "float32")}, {"model": loaded.name, "ids": request.ids})


def _next_logits(models: ModelStore, request: schema.Next) -> "tuple[LoadedModel, Tensor]":
    import torch

    loaded = models.get(request.model)
    feed = start_feed(loaded, request, 1, cache=False)
    with torch.no_grad():
        return loaded, feed.start()[0]


def sampling_of(request: schema.SamplingRequest) -> "Sampling":
    from glassformer.generation import Sampling

    return Sampling(**request.sampling())


def start_feed(
    loaded: LoadedModel, request: schema.TextRequest, new: int, cache: bool, kind: "type[TorchState] | None" = None
) -> Any:
    """Return the decode state of one prompt, checked as in `generate`. An encoder-decoder continues its `target`."""
    import torch

    from glassformer.generation.request import check_length, read_prompts
    from glassformer.generation.state import TorchState

    ids = loaded.check_ids(request.ids if request.ids is not None else loaded.encode(request.text or ""))
    model: Any = loaded.model  # read_prompts refuses an encoder
    rows = read_prompts(model, [ids])
    target = None if request.target is None else target_of(loaded, ids, request.target)
    new += 0 if target is None else len(target) - 1
    check_length(model, rows, new)
    feed = (kind or TorchState)(model, rows, new, "static" if cache else None, None)
    if target is not None:
        feed.tokens = torch.tensor([target], device=model.device)
    return feed


@dataclass(frozen=True)
class Step:
    """One generated token."""

    id: int
    p: float
    milliseconds: float
    kv_bytes: int
    logits: "Tensor"


def steps(feed: Any, new: int, sampling: "Sampling", seed: int, stops: list[list[int]]) -> Iterator[Step]:
    """Generate one token at a time, with time and memory. Same random numbers as `generate`, so the same tokens.

    Checks for cancellation before each token.
    """
    import torch

    from glassformer.generation.loop import uniforms
    from glassformer.generation.sampling import choose, distribution
    from glassformer.generation.state import ends_with, evaluating, one_thread

    uniform, generated = uniforms(seed, 1, new), []
    token = torch.empty(0)
    for step in range(new):
        check_cancelled()
        begin = time.perf_counter()
        with evaluating(feed.model):
            logits = feed.step(token) if step else feed.start()
            with one_thread(feed.owns_threads):
                uniform = uniform.to(logits.device)
                token = choose(logits, sampling, uniform[:, step])
                probability = float(distribution(logits, sampling)[0, token[0]])
        cache = getattr(feed, "cache", None)  # that of a kernel is not counted
        spent = 1000 * (time.perf_counter() - begin)
        generated.append(int(token[0]))
        yield Step(generated[-1], probability, spent, 0 if cache is None else cache.n_bytes(), logits[0])
        if ends_with(generated, stops):
            return


def generate(models: ModelStore, request: schema.Generate, emit: Emit) -> None:
    """Emit one `token` event per token, then `done`."""
    from glassformer.generation.request import read_stop

    loaded = models.get(request.model)
    begin = time.perf_counter()
    feed = start_feed(loaded, request, request.max_new_tokens, request.cache)
    generated: list[int] = []
    shown, total = "", 0.0
    for step in steps(feed, request.max_new_tokens, sampling_of(request), request.seed, read_stop(loaded.model, None)):
        generated.append(step.id)
        total += step.milliseconds
        text = loaded.decode(generated).rstrip("\ufffd")  # hold back the first bytes of an incomplete character
        new_text = text[len(shown) :] if text.startswith(shown) else ""
        shown += new_text
        token = {"id": step.id, "piece": loaded.token_text(step.id), "text": new_text, "p": step.p}
        emit("token", {**token, "ms": step.milliseconds, "kv_bytes": step.kv_bytes})
    seconds = time.perf_counter() - begin
    n = len(generated)
    facts = {"text": loaded.decode(generated), "ids": generated, "ms": 1000 * seconds, "tokens_per_s": n / seconds}
    emit("done", {**facts, "token_ms": total / n, "cache": request.cache})


def beam(models: ModelStore, request: schema.Beam) -> dict[str, Any]:
    """Return the tree of a beam search: the candidates of each step, which of them were kept, and the best text."""
    import torch

    from glassformer.generation.beam import BeamSettings, beam_search
    from glassformer.generation.request import read_stop
    from glassformer.generation.state import TorchState

    class RecordingState(TorchState):
        """Record the logits, and the parent and token of each beam that continues."""

        def start(self) -> "Tensor":
            self.logits = [super().start()]
            self.parents: list[list[int]] = []
            self.chosen: list[list[int]] = []
            return self.logits[0]

        def reorder(self, parents: "Tensor") -> None:
            super().reorder(parents)
            self.parents.append(parents.tolist())

        def step(self, tokens: "Tensor") -> "Tensor":
            self.chosen.append(tokens.tolist())
            self.logits.append(super().step(tokens))
            return self.logits[-1]

    loaded = models.get(request.model)
    feed = start_feed(loaded, request, request.steps, cache=True, kind=RecordingState)
    with torch.no_grad():
        special = loaded.config.special
        settings = BeamSettings(request.beams, request.steps, read_stop(loaded.model, None), special=special)
        (found,) = beam_search(feed, settings)
        nodes = _tree(loaded, feed, request.beams)
    best = {"ids": found.tokens, "text": loaded.decode(found.tokens), "score": found.score}
    return {"nodes": nodes, "best": [{**best, "pieces": [loaded.token_text(i) for i in found.tokens]}]}


def _tree(loaded: LoadedModel, feed: Any, beams: int) -> list[dict[str, Any]]:
    """Return the nodes level by level.

    `logp` is the log-probability of the token, `score` the sum along its path. `kept` means that the beam continues; on
    the last level, that it is among the best.
    """
    import torch

    nodes: list[dict[str, Any]] = [
        {"id": 0, "parent": None, "token": None, "piece": "", "logp": 0.0, "score": 0.0, "kept": True, "level": 0}
    ]
    parents, scores = [0], torch.zeros(1)
    for level, logits in enumerate(feed.logits):
        logprobs = logits[: len(parents)].float().log_softmax(-1)
        totals = (logprobs + scores[:, None]).flatten()
        last = level == len(feed.chosen)
        if last:
            continuing = None
        else:
            # If the vocabulary is smaller than the number of beams, the search fills up with beams that do not exist.
            indices = [min(parent, len(parents) - 1) for parent in feed.parents[level + 1]]
            continuing = list(zip(indices, feed.chosen[level], strict=True))
        best = totals.topk(min(2 * beams, len(totals)))
        children: dict[tuple[int, int], int] = {}
        V = logprobs.shape[1]
        candidates = [(i // V, i % V) for i in best.indices.tolist()]
        for rank, (beam, token) in enumerate(dict.fromkeys([*candidates, *(continuing or [])])):
            node = {"id": len(nodes), "parent": parents[beam], "token": token, "piece": loaded.token_text(token)}
            kept = rank < beams if continuing is None else (beam, token) in continuing
            node |= {"logp": float(logprobs[beam, token]), "score": float(totals[beam * V + token]), "kept": kept}
            children[beam, token] = len(nodes)
            nodes.append({**node, "level": level + 1})
        if continuing is None:
            break
        parents = [children[pair] for pair in continuing]
        scores = torch.stack([totals[beam * V + token] for beam, token in continuing])
    return nodes
