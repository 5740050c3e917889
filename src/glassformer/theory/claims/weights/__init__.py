"""Attention weights and scores. Words in the TOML files, checks and figures in the modules."""
