"""Architecture. The texts are in the TOML files, the checks and figures in the modules."""
