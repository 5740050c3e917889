"""Training on a CPU by compiled C++ kernels: attention, and in float32 the feed-forwards of small models.

`kernels.training` installs them. Machines without a C++ compiler, and processors on which they are not faster, use the
engine, which defines what the kernels compute.
"""
