"""Training on a CPU by compiled kernels: attention, and the feed-forward in float32, forward and backward.

The engine stays the definition; `enable` puts these in place of what they compute equally, and machines without a C++
compiler use the engine.
"""

from glassformer.train.native.modules import enable

__all__ = ["enable"]
