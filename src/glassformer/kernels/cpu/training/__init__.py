"""Training on a CPU by compiled kernels: attention, and in float32 projections and feed-forward, forward and backward.

The engine stays the definition; `enable` puts these in place of what they compute equally, and machines without a C++
compiler, or for whose processor they are not faster, use the engine.
"""

from glassformer.kernels.cpu.training.modules import enable, multiplies, pays

__all__ = ["enable", "multiplies", "pays"]
