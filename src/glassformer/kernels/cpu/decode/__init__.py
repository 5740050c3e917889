"""Decode kernels for a CPU: one call per token, weights read once, in float32, bfloat16, int8 or int4.

`NativeDecoder` replaces a forward pass of `DecoderLM` with a cache, which remains the definition. Configs that it does
not support (`unsupported_config` returns the reason) and machines without a C++ compiler use torch.
"""

from glassformer.kernels.cpu.decode.decoder import NativeDecoder, unsupported_config
from glassformer.kernels.cpu.decode.library import NativeError

__all__ = ["NativeDecoder", "NativeError", "unsupported_config"]
