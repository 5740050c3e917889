"""The tokenizer of a model folder, whatever file it is stored in, and its chat template.

| file | read by |
|---|---|
| `tokenizer.json` | `tokenizers`, as it is |
| `tokenizer.model`, `spiece.model`, … | `sentencepiece`, then converted (`pieces`) |
| `*.tiktoken`, or `tokenizer.model` of Llama 3 | converted (`ranks`) |
"""

from glassformer.weights.tokenizer.folder import (
    TEMPLATE,
    TOKENIZER,
    TOKENIZER_FILES,
    read_chat_template,
    read_tokenizer,
)

__all__ = ["TEMPLATE", "TOKENIZER", "TOKENIZER_FILES", "read_chat_template", "read_tokenizer"]
