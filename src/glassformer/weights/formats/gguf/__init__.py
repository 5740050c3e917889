"""GGUF, the format of llama.cpp. A file is read and written by way of the Hugging Face form of a model.

    our config and state dict  <->  config.json and tensors of a family  <->  metadata and tensors of an architecture

The first arrow is `weights.families`, the second is the table in `architectures`. So a family that Hugging Face folders
know is written as GGUF when llama.cpp has its architecture and the table has a row for it.
"""
