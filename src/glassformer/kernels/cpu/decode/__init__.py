"""Decode and encode kernels for a CPU: one call per token, weights read once, in float32, bfloat16, int8 or int4.

`NativeDecoder` replaces a cached forward pass of `DecoderLM` and `Seq2Seq`, `NativeEncoder` one of an encoder over
texts of unequal length; the models remain the definition. Configs that they do not support (`unsupported_config`
returns the reason) and machines without a C++ compiler use torch.
"""

from glassformer.kernels.cpu.decode.decoder import NativeDecoder
from glassformer.kernels.cpu.decode.encoder import NativeEncoder
from glassformer.kernels.cpu.decode.library import NativeError
from glassformer.kernels.cpu.decode.stack import unsupported_config

__all__ = ["NativeDecoder", "NativeEncoder", "NativeError", "unsupported_config"]
