"""Everything that only makes things faster: compiled kernels for CPUs and GPUs, and the tools that build them."""
