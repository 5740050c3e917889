"""Load and save models: Hugging Face folders, glassformer folders, GGUF files, and the Hugging Face hub.

No pickle is opened but the `ckpt.pt` of nanoGPT, of which only tensors and plain values are read, and transformers is
never imported. A saved model is read back and compared bit for bit before it replaces anything.
"""

from glassformer.weights.errors import WeightsError
from glassformer.weights.export import save
from glassformer.weights.folder import (
    load,
    load_chat_template,
    load_config,
    load_special_tokens,
    load_to_compute,
    load_tokenizer,
    resolve,
    resolve_unless_preset,
)
from glassformer.weights.verify import compare_logits, record_reference, verify_folder

__all__ = [
    "WeightsError",
    "compare_logits",
    "load",
    "load_chat_template",
    "load_config",
    "load_special_tokens",
    "load_to_compute",
    "load_tokenizer",
    "record_reference",
    "resolve",
    "resolve_unless_preset",
    "save",
    "verify_folder",
]
