"""Text in, text out: a prompt encoded by a tokenizer, tokens decoded as they come."""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from glassformer.generation.loop import generate, stream
from glassformer.generation.sampling import Sampling
from glassformer.generation.speculate import Acceptance, Draft, Speculation
from glassformer.model import Model, Seq2Seq

UNFINISHED = "�"
"""What a decoder shows for the first bytes of a character whose rest has not come yet."""


@dataclass
class Continuation:
    """One prompt to be continued: by text when there is a tokenizer, by token ids when asked for (`ids`)."""

    model: Model
    tokenizer: Any
    prompt: str
    ids: bool = False
    stop: tuple[str, ...] = ()
    """Texts (token ids when `ids`) that end the output; they are not shown."""
    max_new_tokens: int | None = None
    """None: 64, or as many as the context still holds."""
    draft: Draft | None = None
    draft_tokens: int = 4
    """As for `generate`."""
    new: list[int] = field(default_factory=list, init=False)
    """Tokens produced so far."""
    finished: str = field(default="length", init=False)
    acceptance: Acceptance | None = field(default=None, init=False)
    """With a draft: what became of its proposals so far."""

    def __post_init__(self) -> None:
        if self.ids:
            self.tokens = _read_ids(self.prompt)
        elif self.tokenizer is None:
            raise ValueError("the model folder has no tokenizer.json: put it there, or give token ids with --ids.")
        else:
            self.tokens = self._encode(self.prompt)
            known, has = self.tokenizer.get_vocab_size(), self.model.config.vocab_size
            if known > has:
                raise ValueError(f"the tokenizer has {known} tokens, the model {has}: they do not belong together.")
        if not self.tokens:
            raise ValueError("the prompt is empty: a model needs at least one token to go on from.")
        if "" in self.stop:
            raise ValueError("a stop text is empty: it would end the output at once.")
        # an encoder-decoder answers its prompt; a decoder goes on from it
        self.head = [] if isinstance(self.model, Seq2Seq) else list(self.tokens)
        if self.max_new_tokens is None:
            room = 64 if self.model.config.max_len is None else self.model.config.max_len - max(1, len(self.head))
            self.max_new_tokens = max(1, min(64, room))

    def pieces(self, sampling: Sampling, seed: int = 0, cache: bool = True) -> Iterator[str]:
        """The text as it grows, the prompt first. Joined, the pieces are the whole text.

        Held back until it is decided: the first bytes of a character, and what may turn out to begin a stop text.
        """
        assert self.max_new_tokens is not None
        self.new = []
        # made before anything is shown: it refuses what cannot be done
        limits = (self.max_new_tokens, sampling, cache, seed, self._stop_ids())
        steps = stream(self.model, [self.tokens], *limits, draft=self.draft, draft_tokens=self.draft_tokens)
        text = shown = start = self._decode(self.head)
        yield shown
        for (token,) in steps:
            assert token is not None  # one row: the stream ends with it
            self.new.append(token)
            if isinstance(steps, Speculation):
                (self.acceptance,) = steps.acceptance
            text = self._decode(self.head + self.new)
            cut = self._find_stop(text, len(start))
            if cut is not None:
                self.finished = "stop"
                text = text[:cut]
                break
            sure = text[: len(text) - self._undecided(text)]
            if sure.startswith(shown):
                yield sure[len(shown) :]
                shown = sure
        if self.new and self.new[-1] in self.model.config.special.eos:
            self.finished = "stop"
        yield text[len(shown) :]

    def run(
        self, sampling: Sampling, beams: int = 1, length_penalty: float = 1.0, seed: int = 0, cache: bool = True
    ) -> dict[str, Any]:
        """Everything at once, with its measures."""
        assert self.max_new_tokens is not None
        begin, score = time.perf_counter(), None
        if beams == 1:
            text = "".join(self.pieces(sampling, seed, cache))
        else:
            limits = (self.max_new_tokens, sampling, beams, cache, seed, self._stop_ids(), length_penalty)
            out = generate(self.model, [self.tokens], *limits, draft=self.draft, draft_tokens=self.draft_tokens)
            self.new, self.finished = out.new[0], out.finished[0]
            score = out.scores[0] if out.scores else None
            text = self._decode(self.head + self.new)
            cut = self._find_stop(text, len(self._decode(self.head)))
            text = text if cut is None else text[:cut]
        seconds = time.perf_counter() - begin
        return {
            "prompt": self.prompt,
            "text": text,
            "prompt_tokens": self.tokens,
            "new_tokens": self.new,
            "finished": self.finished,
            "score": score,
            "draft": None if self.acceptance is None else asdict(self.acceptance),
            "seconds": seconds,
            "tokens_per_second": len(self.new) / seconds,
        }

    def _encode(self, text: str) -> list[int]:
        try:
            return list(self.tokenizer.encode(text).ids)
        except Exception as error:  # the library raises plain Exception for what its vocabulary lacks
            for character in text:
                try:
                    self.tokenizer.encode(character)
                except Exception:
                    raise ValueError(
                        f"the prompt holds {character!r} (U+{ord(character):04X}), which is not one of the "
                        f"{self.tokenizer.get_vocab_size()} tokens of this model: leave it out."
                    ) from None
            raise ValueError(f"the tokenizer cannot encode the prompt: {error}.") from None

    def _decode(self, tokens: list[int]) -> str:
        if self.ids:
            return " ".join(map(str, tokens))
        return self.tokenizer.decode(tokens) if tokens else ""

    def _stop_ids(self) -> list[Any]:
        """Ends for the loop: the model's own end of text, and the user's when they are ids."""
        return [*self.model.config.special.eos, *([_read_ids(s) for s in self.stop] if self.ids else [])]

    def _find_stop(self, text: str, after: int) -> int | None:
        """Where the first stop text begins, looking at what came after the prompt."""
        found = [] if self.ids else [at for at in (text.find(s, after) for s in self.stop) if at >= 0]
        return min(found) if found else None

    def _undecided(self, text: str) -> int:
        """How many characters at the end must wait."""
        if self.ids:
            return 0
        waiting = len(text) - len(text.rstrip(UNFINISHED))
        begun = (n for s in self.stop for n in range(len(s) - 1, 0, -1) if text.endswith(s[:n]))
        return max(waiting, max(begun, default=0))


def _read_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise ValueError(f"with --ids, text is token ids such as '15 27 3': got {text!r}.") from None


def token_text(tokenizer: Any, token: int) -> str:
    """A token as text: its blanks kept, and its id where it is no whole character or there is no tokenizer."""
    piece = None if tokenizer is None else tokenizer.id_to_token(token)
    if piece is None:
        return f"#{token}"
    if "▁" in piece:  # sentencepiece's blank, which decoding a single token would drop
        return str(piece).replace("▁", " ")
    spoken = tokenizer.decode([token], skip_special_tokens=False)
    if "\ufffd" in spoken:
        return f"#{token}"
    return str(spoken if spoken and not piece.startswith("##") else piece)
