"""How a model is put together: which weights run where, what is added to the residual stream, in which dtype.

These probes read the graph of one recorded forward pass, so modules, functions and einsums are examined alike.
"""
