"""Training data: corpora, tokenizers, batches, synthetic tasks and n-gram baselines."""
