"""Named places in the computation, and how to listen to them.

Every forward takes a `tap`. At each site the model writes `x = tap("resid_mid", x)`: a tap may record the tensor or
return another one in its place. The model never wraps, hooks or subclasses anything for the sake of being looked at;
with no tap the call is an identity and attention takes its fused path.

Sites of a decoder-only model (an encoder-decoder puts `encoder.` or `decoder.` before `embed`, `block` and `final`):

    embed                            (B,T,D)  tokens (+ segments, + positions, normed)
    blocks.I.resid_pre                (B,T,D)  the stream entering block I
    blocks.I.attention.normed         (B,T,D)  what attention reads (pre-norm and parallel placement), infused
                                              positions not yet added
    blocks.I.attention.q              (B,H,T,K)  after QK-norm and rotation
    blocks.I.attention.k              (B,G,S,K)  cached and new
    blocks.I.attention.v              (B,G,S,U)
    blocks.I.attention.scores         (B,H,T,S)  scaled, biased and masked: what softmax reads
    blocks.I.attention.pattern        (B,H,T,S)
    blocks.I.attention.heads          (B,H,T,U)  pattern @ v, before the output projection
    blocks.I.attention.out            (B,T,D)    output of the projection: what is added to the stream, unless
    blocks.I.attention.out_normed     (B,T,D)    ... a norm follows it (placements after and sandwich)
    blocks.I.cross.*                  the same, over the encoder's output
    blocks.I.resid_mid                (B,T,D)  between attention (and cross-attention) and feed-forward; an
                                              attention-only block has no feedforward.* sites
    blocks.I.feedforward.normed       (B,T,D)
    blocks.I.feedforward.pre          (B,T,F)  before the activation (a gate's, when gated)
    blocks.I.feedforward.post         (B,T,F)  what the down projection reads
    blocks.I.feedforward.router       (B,T,E)  probabilities over experts
    blocks.I.feedforward.choice       (B,T,A)  experts chosen
    blocks.I.feedforward.out          (B,T,D)
    blocks.I.feedforward.out_normed   (B,T,D)  what is added to the stream with placements after and sandwich
    blocks.I.resid_post               (B,T,D)
    final                            (B,T,D)  what the head reads
    logits                           (B,T,V)
"""

from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Tap(Protocol):
    """What a forward calls at each site. `wants` is asked before anything is computed only to be looked at."""

    def __call__(self, site: str, value: Tensor) -> Tensor: ...

    def wants(self, site: str) -> bool: ...


class NoTap:
    """Records nothing, changes nothing."""

    def __call__(self, site: str, value: Tensor) -> Tensor:
        return value

    def wants(self, site: str) -> bool:
        return False


NO_TAP = NoTap()


class Scoped:
    """A tap whose sites all start with a prefix: a block names its sites without knowing its number."""

    def __init__(self, tap: Tap, prefix: str):
        self.tap, self.prefix = tap, prefix

    def __call__(self, site: str, value: Tensor) -> Tensor:
        return self.tap(self.prefix + site, value)

    def wants(self, site: str) -> bool:
        return self.tap.wants(self.prefix + site)


def scoped(tap: Tap, prefix: str) -> Tap:
    """`tap` under a prefix; the no-op tap stays itself, so an unwatched forward builds no strings."""
    return tap if tap is NO_TAP else Scoped(tap, prefix)
