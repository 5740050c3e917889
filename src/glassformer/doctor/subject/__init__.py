"""The model under examination: how it is called, copied, measured and what it declares about itself."""
