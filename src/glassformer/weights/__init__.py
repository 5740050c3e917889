"""Weights in and out: Hugging Face folders, our own folders, and the hub.

Only safetensors and JSON are read, never a pickle, and transformers is never imported. What is written is read back
and compared, bit for bit, before it takes its place.
"""

from glassformer.weights.errors import WeightsError
from glassformer.weights.export import save
from glassformer.weights.folder import load, load_config, load_tokenizer
from glassformer.weights.hub import resolve
from glassformer.weights.verify import compare_logits, record_reference, verify_folder

__all__ = [
    "WeightsError",
    "compare_logits",
    "load",
    "load_config",
    "load_tokenizer",
    "record_reference",
    "resolve",
    "save",
    "verify_folder",
]
