"""From logits to text: sampling, the decoding loop, beam search."""

from glassformer.callable_module import make_callable
from glassformer.generation.loop import Generated, generate, stream
from glassformer.generation.sampling import Sampling, distribution, draw
from glassformer.generation.speculate import Acceptance

__all__ = ["Acceptance", "Generated", "Sampling", "distribution", "draw", "generate", "stream"]

make_callable(__name__, "generate")
