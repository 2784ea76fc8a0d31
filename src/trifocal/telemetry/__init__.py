"""Figures of the attention during a run: gates, selected blocks, and the attention picture."""
