"""The guided tour: train a model, sample from it, check it, prove claims, diagnose a bug, and write a report page."""
