"""Kernels for CPUs, compiled from C++ on first use."""
