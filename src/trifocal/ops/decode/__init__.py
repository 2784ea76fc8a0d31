"""Attention of one decoding step: caches, the reference, and products that do not depend on the batch."""
