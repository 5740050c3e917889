"""Compilers and libraries that the kernels are built with: a C++ compiler and NVRTC."""
