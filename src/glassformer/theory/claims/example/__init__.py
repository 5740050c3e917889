"""A worked example in exact rationals. The texts are in the TOML files, the checks and figures in the modules."""
