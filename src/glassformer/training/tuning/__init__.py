"""Fine-tuning: start from an existing model, extend it, freeze parts of it, or train adapters of it."""
