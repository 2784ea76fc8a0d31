"""Attention to the selected blocks in Gluon, for Hopper."""
