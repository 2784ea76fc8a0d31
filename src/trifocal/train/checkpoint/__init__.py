"""Checkpoints: written, verified, read, and exported."""
