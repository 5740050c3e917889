"""Playground: tokens, the next token, text as it comes, the tree of a beam search."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from glassformer.studio import schema
from glassformer.studio.api.reading import target_of
from glassformer.studio.errors import StudioError
from glassformer.studio.events import Emit
from glassformer.studio.jobs import Ticket
from glassformer.studio.shelf import Loaded, Shelf
from glassformer.studio.wire import Packet

if TYPE_CHECKING:
    from torch import Tensor

    from glassformer.generation import Sampling
    from glassformer.generation.feed import Feed


def tokens(shelf: Shelf, asked: schema.Tokens) -> dict[str, Any]:
    """Ids and pieces of a text; offsets say where in the text each piece stands. Of an encoder-decoder also what its
    decoder reads: as given, or its own answer."""
    loaded = shelf.get(asked.model)
    if asked.ids is not None:
        told = {**_told(loaded, loaded.checked(asked.ids)), "text": loaded.decode(asked.ids)}
    else:
        text = asked.text or ""
        ids = loaded.encode(text) if text else []
        offsets = [list(pair) for pair in loaded.tokenizer.encode(text).offsets] if ids else []
        told = {**_told(loaded, ids), "offsets": offsets, "text": text}
    given = _started(loaded, asked)
    target = target_of(loaded, told["ids"], given) if told["ids"] or given is not None else None
    return told if target is None else {**told, "target": {**_told(loaded, target), "text": loaded.decode(target[1:])}}


def _told(loaded: Loaded, ids: list[int]) -> dict[str, Any]:
    return {"ids": ids, "pieces": [loaded.say(i) for i in ids]}


def _started(loaded: Loaded, asked: schema.Tokens) -> list[int] | None:
    """The decoder's tokens of a request; a text begins after the start token and has no end token."""
    if not asked.target_text:
        return asked.target
    if loaded.tokenizer is None:
        raise StudioError(f"{loaded.name} has no tokenizer.json beside its weights: give target as token ids.")
    start = loaded.config.special.start
    ids = loaded.tokenizer.encode(asked.target_text, add_special_tokens=False).ids
    return ([] if start is None else [start]) + ids


def vocabulary(shelf: Shelf, asked: schema.AboutModel) -> dict[str, Any]:
    """The word of every id."""
    return {"pieces": shelf.get(asked.model).pieces()}


def next_token(shelf: Shelf, asked: schema.Next) -> dict[str, Any]:
    """The next token's distribution: `raw` is the model's own, `p` what sampling leaves of it."""
    import torch

    from glassformer.generation import distribution

    loaded, logits = _next_logits(shelf, asked)
    raw, left = logits.double().softmax(-1), distribution(logits[None], sampling_of(asked))[0]
    # by the model's own order, so that what was cut off is seen beside what stayed
    best = logits.topk(min(asked.count, len(logits))).indices.tolist()
    rows = [
        {
            "id": i,
            "piece": loaded.say(i),
            "logit": float(logits[i]),
            "raw": float(raw[i]),
            "p": float(left[i]),
            "kept": bool(left[i] > 0),
        }
        for i in best
    ]
    entropy = float(torch.special.entr(left).sum())
    return {"top": rows, "entropy": entropy, "kept": int((left > 0).sum()), "vocab": len(logits)}


def next_logits(shelf: Shelf, asked: schema.Next) -> Packet:
    """All logits, for sliders that redraw without asking again."""
    loaded, logits = _next_logits(shelf, asked)
    return Packet({"logits": (logits, "f32")}, {"model": loaded.name, "ids": asked.ids})


def _next_logits(shelf: Shelf, asked: schema.Next) -> "tuple[Loaded, Tensor]":
    import torch

    loaded = shelf.get(asked.model)
    feed = start_feed(loaded, asked, 1, cache=False)
    with torch.no_grad():
        return loaded, feed.start()[0]


def sampling_of(asked: schema.Sampled) -> "Sampling":
    from glassformer.generation import Sampling

    return Sampling(asked.temperature, asked.top_k, asked.top_p, asked.min_p)


def start_feed(loaded: Loaded, asked: schema.AboutText, new: int, cache: bool, kind: "type[Feed] | None" = None) -> Any:
    """A feed of one prompt, checked as `generate` checks it; an encoder-decoder goes on from its `target`, if any."""
    import torch

    from glassformer.generation.feed import Feed, check_length, read_prompts

    ids = loaded.checked(asked.ids if asked.ids is not None else loaded.encode(asked.text or ""))
    model: Any = loaded.model  # an encoder is refused by the next line
    rows = read_prompts(model, [ids])
    target = None if asked.target is None else target_of(loaded, ids, asked.target)
    new += 0 if target is None else len(target) - 1
    check_length(model, rows, new)
    feed = (kind or Feed)(model, rows, new, "static" if cache else None, None)
    if target is not None:
        feed.tokens = torch.tensor([target], device=model.device)
    return feed


@dataclass(frozen=True)
class Step:
    """One token as it was drawn."""

    id: int
    p: float
    milliseconds: float
    kv_bytes: int
    logits: "Tensor"


def steps(feed: Any, new: int, sampling: "Sampling", seed: int, stops: list[list[int]]) -> Iterator[Step]:
    """`generate`'s loop, one token at a time, with what each cost: the same draws, so the same tokens."""
    import torch

    from glassformer.generation.feed import ends_with
    from glassformer.generation.loop import uniforms
    from glassformer.generation.sampling import choose, distribution

    uniform, said = uniforms(seed, 1, new), []
    token = torch.empty(0)
    for step in range(new):
        begin = time.perf_counter()
        with torch.no_grad():
            logits = feed.step(token) if step else feed.start()
            token = choose(logits, sampling, uniform[:, step])
            chance = float(distribution(logits, sampling)[0, token[0]])
        spent = 1000 * (time.perf_counter() - begin)
        said.append(int(token[0]))
        yield Step(said[-1], chance, spent, 0 if feed.cache is None else feed.cache.n_bytes(), logits[0])
        if ends_with(said, stops):
            return


def generate(shelf: Shelf, asked: schema.Generate, ticket: Ticket, emit: Emit) -> None:
    """Events `token` as they come, then `done`."""
    from glassformer.generation.loop import read_stop

    loaded = shelf.get(asked.model)
    begin = time.perf_counter()
    feed = start_feed(loaded, asked, asked.max_new_tokens, asked.cache)
    said: list[int] = []
    shown, total = "", 0.0
    for step in steps(feed, asked.max_new_tokens, sampling_of(asked), asked.seed, read_stop(loaded.model, None)):
        said.append(step.id)
        total += step.milliseconds
        text = loaded.decode(said).rstrip("\ufffd")  # the first bytes of a character wait for the rest
        more = text[len(shown) :] if text.startswith(shown) else ""
        shown += more
        told = {"id": step.id, "piece": loaded.say(step.id), "text": more, "p": step.p}
        emit("token", {**told, "ms": step.milliseconds, "kv_bytes": step.kv_bytes})
    seconds = time.perf_counter() - begin
    facts = {"text": loaded.decode(said), "ids": said, "ms": 1000 * seconds, "tokens_per_s": len(said) / seconds}
    emit("done", {**facts, "token_ms": total / len(said), "cache": asked.cache})


def beam(shelf: Shelf, asked: schema.Beam) -> dict[str, Any]:
    """The tree of a beam search: what each step considered, what it kept, and the best text found."""
    import torch

    from glassformer.generation.beam import beam_search
    from glassformer.generation.feed import Feed
    from glassformer.generation.loop import read_stop

    class Watched(Feed):
        """Notes what the search feeds: the parent and the token of each beam that goes on."""

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

    loaded = shelf.get(asked.model)
    feed = start_feed(loaded, asked, asked.steps, cache=True, kind=Watched)
    with torch.no_grad():
        (found,) = beam_search(feed, asked.steps, asked.beams, 1.0, read_stop(loaded.model, None), 1.0)
        nodes = _tree(loaded, feed, asked.beams)
    best = {"ids": found.tokens, "text": loaded.decode(found.tokens), "score": found.score}
    return {"nodes": nodes, "best": [{**best, "pieces": [loaded.say(i) for i in found.tokens]}]}


def _tree(loaded: Loaded, feed: Any, beams: int) -> list[dict[str, Any]]:
    """Nodes level by level. `logp` is the token's own, `score` the sum along its path; `kept` went on (at the last
    level: is among the best)."""
    import torch

    nodes: list[dict[str, Any]] = [
        {"id": 0, "parent": None, "token": None, "piece": "", "logp": 0.0, "score": 0.0, "kept": True, "level": 0}
    ]
    above, scores = [0], torch.zeros(1)
    for level, logits in enumerate(feed.logits):
        own = logits[: len(above)].float().log_softmax(-1)
        totals = (own + scores[:, None]).flatten()
        last = level == len(feed.chosen)
        if last:
            going = None
        else:
            # a vocabulary smaller than the beams makes the search repeat hopeless ones from beams that are not there
            held = [min(parent, len(above) - 1) for parent in feed.parents[level + 1]]
            going = list(zip(held, feed.chosen[level], strict=True))
        best = totals.topk(min(2 * beams, len(totals)))
        below: dict[tuple[int, int], int] = {}
        V = own.shape[1]
        wanted = [(i // V, i % V) for i in best.indices.tolist()]
        for rank, (beam, token) in enumerate(dict.fromkeys([*wanted, *(going or [])])):
            node = {"id": len(nodes), "parent": above[beam], "token": token, "piece": loaded.say(token)}
            kept = rank < beams if going is None else (beam, token) in going
            node |= {"logp": float(own[beam, token]), "score": float(totals[beam * V + token]), "kept": kept}
            below[beam, token] = len(nodes)
            nodes.append({**node, "level": level + 1})
        if going is None:
            break
        above = [below[pair] for pair in going]
        scores = torch.stack([totals[beam * V + token] for beam, token in going])
    return nodes
