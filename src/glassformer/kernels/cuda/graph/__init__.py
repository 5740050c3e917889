"""A decode step of any model as one CUDA graph: fused kernels where a part has them, torch's where it has not."""
