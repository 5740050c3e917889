"""Training on several processes: the only code that imports torch.distributed."""
