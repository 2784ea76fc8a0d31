"""FlashAttention over a range of keys per query in Gluon, for Hopper."""
