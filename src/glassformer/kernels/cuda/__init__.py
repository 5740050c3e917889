"""Kernels for NVIDIA GPUs."""
