"""Minimal reproductions: scripts that show one finding each, with torch and the model's own package alone."""

from glassformer.doctor.reproduce.script import Reproduction, reproduce, runs

__all__ = ["Reproduction", "reproduce", "runs"]
