"""Read any PyTorch model: record its operations, find attention, norms and feed-forwards and name them."""
