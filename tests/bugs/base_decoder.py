"""The decoder of the base models: causal attention, loss, and greedy generation with cache and draft."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.bugs.base import Cache, Transformer, counted


class Decoder(Transformer):
    """Next-token logits; see base.py for the spelling."""

    def new_cache(self) -> Cache:
        return self.cache_class(len(self.blocks))

    def pattern(self, queries: Tensor, keys: Tensor) -> Tensor:
        allowed = keys[None, :] <= queries[:, None]
        if self.cfg.window is not None:
            allowed = allowed & self.within(queries, keys)
        return allowed

    def within(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Exactly `window` keys, the query's own among them."""
        return queries[:, None] - keys[None, :] < self.cfg.window

    def forward(
        self,
        idx: Tensor,
        attention_mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor | tuple[Tensor, Cache]:
        noted = Cache(len(self.blocks)) if cache is None else cache
        logits = self.run(idx, self.real_tokens(idx, attention_mask), positions, noted, cache)
        return logits if cache is None else (logits, cache)

    def loss(self, idx: Tensor, labels: Tensor | None = None, attention_mask: Tensor | None = None) -> Tensor:
        """Mean over real next tokens whose predecessor is real; labels of -100 do not count."""
        logits = self(idx, attention_mask=attention_mask)
        labels = self.counted(idx if labels is None else labels, attention_mask)
        return self.cross_entropy(logits, labels)

    def counted(self, labels: Tensor, attention_mask: Tensor | None) -> Tensor:
        return counted(labels, attention_mask)

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)

    @torch.no_grad()
    def generate(
        self,
        idx: Tensor,
        n: int,
        attention_mask: Tensor | None = None,
        use_cache: bool = True,
        draft: nn.Module | None = None,
    ) -> Tensor:
        """The prompt and n greedy tokens. `draft` proposes, this model decides: the same tokens, in fewer calls."""
        real = self.real_tokens(idx, attention_mask)
        if draft is not None:
            return self.speculate(idx, n, real, draft)
        cache = self.new_cache() if use_cache else None
        new = idx
        for _ in range(n):
            if cache is None:
                logits = self(self.context(idx), attention_mask=self.context(real))
                seen = self.context(real)
            else:
                seen = real[:, -new.shape[1] :]
                logits, cache = self(new, attention_mask=seen, cache=cache)
            new = self.choose(logits, seen)
            idx, real = torch.cat([idx, new], 1), torch.cat([real, torch.ones_like(new, dtype=torch.bool)], 1)
        return idx

    def context(self, row: Tensor) -> Tensor:
        """What of the sequence is read when nothing is cached: all of it."""
        return row

    def choose(self, logits: Tensor, real: Tensor) -> Tensor:
        """(B,1): the most likely token after the last real one of each row."""
        index = torch.arange(real.shape[1], device=real.device)
        last = torch.where(real, index, 0).amax(1)
        return logits[torch.arange(len(logits)), last].argmax(-1, keepdim=True)

    def speculate(self, idx: Tensor, n: int, real: Tensor, draft: nn.Module, ahead: int = 4) -> Tensor:
        """Verify `ahead` proposals in one call, keep those all rows agree with and one more, roll back the rest."""
        length = idx.shape[1] + n
        logits, cache = self(idx, attention_mask=real, cache=self.new_cache())
        idx = torch.cat([idx, self.choose(logits, real)], 1)
        while idx.shape[1] < length:
            known = len(cache)
            mask = torch.cat([real, torch.ones_like(idx[:, real.shape[1] :], dtype=torch.bool)], 1)
            proposal = draft.generate(idx, ahead, attention_mask=mask)[:, idx.shape[1] :]
            logits, cache = self(torch.cat([idx[:, -1:], proposal], 1), cache=cache)
            best = logits.argmax(-1)
            agreed = self.agreement(best, proposal)
            idx = torch.cat([idx, proposal[:, :agreed], best[:, agreed : agreed + 1]], 1)
            cache.crop(known + 1 + agreed)
        return idx[:, :length]

    def agreement(self, best: Tensor, proposal: Tensor) -> int:
        """How many proposals, counted from the first, are this model's own choice in every row."""
        return int((best[:, :-1] == proposal).all(0).long().cumprod(0).sum())
