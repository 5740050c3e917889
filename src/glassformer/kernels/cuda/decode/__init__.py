"""Decoding on a GPU by one kernel that stays there; imported only where Triton is."""
