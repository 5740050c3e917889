"""Attention as a matrix; permutations. Words in the TOML files, checks and figures in the modules."""
