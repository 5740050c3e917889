"""Benchmarks for developers that run on a CPU; each is a command, `python -m glassformer.bench.developer.NAME`."""
