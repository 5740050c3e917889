"""The PyTorch engine: one Block, three models, logits out."""

from glassformer.model import masks
from glassformer.model.cache import Cache
from glassformer.model.context import NO_TAP, Tap
from glassformer.model.transformer import DecoderLM, EncoderLM, Model, Seq2Seq, build, n_parameters

__all__ = ["NO_TAP", "Cache", "DecoderLM", "EncoderLM", "Model", "Seq2Seq", "Tap", "build", "masks", "n_parameters"]
