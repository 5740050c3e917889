"""Decoding by compiled kernels on a CPU: one call per token, weights read once, in float32, bfloat16 or int8.

`NativeDecoder` takes the place of the engine's cached step; the engine itself stays the definition. What it cannot do
(`unsupported_config(config)` gives the reason), and machines without a C++ compiler, use the engine.
"""

from glassformer.kernels.cpu.decode.decoder import NativeDecoder, unsupported_config
from glassformer.kernels.cpu.decode.library import NativeError, build

__all__ = ["NativeDecoder", "NativeError", "build", "unsupported_config"]
