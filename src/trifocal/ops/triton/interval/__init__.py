"""FlashAttention over a range of keys per query: the compressed and the window branch."""
