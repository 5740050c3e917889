"""Language-model probability. Words in the TOML files, checks and figures in the modules."""
