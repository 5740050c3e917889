"""Tokenizers that are stored in another file than tokenizer.json, and chat templates.

| file | read by |
|---|---|
| `tokenizer.model`, `spiece.model`, … | `sentencepiece`, then converted (`pieces`) |
| `*.tiktoken`, or `tokenizer.model` of Llama 3 | converted (`ranks`) |
"""
