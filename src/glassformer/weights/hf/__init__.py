"""Families of models, each described by the keys of its config.json and the names of its tensors."""

from glassformer.weights.hf import gemma

DECODERS = (*gemma.FAMILIES,)
"""Every family of decoders, in the order in which saving tries them."""
