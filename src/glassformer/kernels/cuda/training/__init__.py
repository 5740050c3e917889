"""Kernels of a training step on an NVIDIA GPU."""
