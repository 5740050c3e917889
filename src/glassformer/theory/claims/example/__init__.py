"""A worked example in exact rationals. Words in the TOML files, checks and figures in the modules."""
