"""Decode kernels for NVIDIA GPUs: a persistent kernel for one sequence, a CUDA graph for any number of them."""
