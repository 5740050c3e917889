"""File formats other than safetensors folders: GGUF (in and out), ONNX (out), nanoGPT checkpoints (in), tokenizers."""
