"""Attention as a matrix; permutations. The texts are in the TOML files, the checks and figures in the modules."""
