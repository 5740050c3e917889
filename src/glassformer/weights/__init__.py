"""Load and save models: Hugging Face folders, glassformer folders, GGUF files, and the Hugging Face hub.

No pickle is opened but the `ckpt.pt` of nanoGPT, of which only tensors and plain values are read, and transformers is
never imported. A saved model is read back and compared bit for bit before it replaces anything.

Names are imported when first used: a training run with fresh weights needs no format of other libraries.
"""

from typing import TYPE_CHECKING

from glassformer import imported_when_used

_HOMES = {
    "WeightsError": "errors",
    "compare_logits": "verify",
    "load": "folder",
    "load_chat_template": "folder",
    "load_config": "folder",
    "load_special_tokens": "folder",
    "load_to_compute": "folder",
    "load_tokenizer": "folder",
    "record_reference": "verify",
    "resolve": "folder",
    "resolve_unless_preset": "folder",
    "save": "export",
    "verify_folder": "verify",
}

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

if TYPE_CHECKING:
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

__getattr__ = imported_when_used(__name__, _HOMES)
