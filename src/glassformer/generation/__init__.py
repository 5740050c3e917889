"""From logits to text: sampling, the decoding loop, beam search."""

from glassformer.generation.encoding import encode
from glassformer.generation.loop import Generated, generate, stream
from glassformer.generation.sampling import Sampling, distribution, draw
from glassformer.generation.speculate import Acceptance

__all__ = ["Acceptance", "Generated", "Sampling", "distribution", "draw", "encode", "generate", "stream"]
