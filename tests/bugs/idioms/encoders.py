"""Encoders that say so in one way only: a class attribute, a field, an argument that encoders have."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn

VOCAB, DIM = 71, 32


class Body(nn.Module):
    """Two layers of torch's own encoder over learned positions."""

    def __init__(self, causal: bool = False):
        super().__init__()
        self.hides_future = causal
        self.words, self.spots = nn.Embedding(VOCAB, DIM), nn.Embedding(160, DIM)
        layer = nn.TransformerEncoderLayer(DIM, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(DIM), enable_nested_tensor=False)
        self.out = nn.Linear(DIM, VOCAB)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.05)

    def run(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        t = x.shape[1]
        future = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1) if self.hides_future else None
        y = self.words(x) + self.spots(torch.arange(t, device=x.device))
        return self.out(self.layers(y, mask=future, src_key_padding_mask=hidden))


class ByClass(Body):
    kind = "encoder"

    def forward(self, x, keep=None):
        return self.run(x, None if keep is None else keep == 0)


class ByClassFlag(Body):
    bidirectional = True

    def forward(self, x):
        return self.run(x, None)


class ByPaddingArgument(Body):
    def forward(self, src, src_key_padding_mask=None):
        return self.run(src, src_key_padding_mask)


class BySegments(Body):
    def forward(self, x, token_type_ids=None):
        return self.run(x, None)


class ByField(Body):
    def __init__(self, causal: bool = False):
        super().__init__(causal)
        self.config = SimpleNamespace(vocab_size=VOCAB, hidden_size=DIM, is_decoder=False)

    def forward(self, x):
        return self.run(x, None)


class ByObjective(Body):
    def __init__(self, causal: bool = False):
        super().__init__(causal)
        self.config = {"vocab_size": VOCAB, "objective": "mlm"}

    def forward(self, x):
        return self.run(x, None)


class Undeclared(Body):
    def forward(self, x):
        return self.run(x, None)


class WithMaskToken(Body):
    def __init__(self, causal: bool = False):
        super().__init__(causal)
        self.mask_token_id = 3

    def forward(self, x):
        return self.run(x, None)


class WithPooler(Body):
    def __init__(self, causal: bool = False):
        super().__init__(causal)
        self.pooler = nn.Linear(DIM, DIM)

    def forward(self, x):
        return self.run(x, None)


def called(name: str, base: type[Body]) -> type[Body]:
    """The class under another name."""
    return type(name, (base,), {})


SPELLINGS = ("Enc", "TinyEnc", "EncLM", "Encoder", "TransformerEncoderLM", "MyENC", "text_encoder_lm")
"""Class names that decoders made of encoder layers have as well as encoders."""
TWO_HINTS = tuple(called("TinyEncoder", base) for base in (BySegments, WithMaskToken, WithPooler))
"""A name and something else that belongs to encoders: one that hides the future is broken."""
CLEAR = (ByClass, ByClassFlag, ByField, ByObjective)
"""Encoders by declaration: one that hides the future is broken."""
FAINT = (ByPaddingArgument, BySegments)
"""Names that decoders made of torch's encoder layers have as well: what the model computes decides."""


def build(cls: type[Body], causal: bool = False) -> Body:
    torch.manual_seed(5)
    return cls(causal).eval()
