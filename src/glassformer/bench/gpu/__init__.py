"""Benchmarks and checks for a machine with a GPU; each is a command, `python -m glassformer.bench.gpu.NAME`."""
