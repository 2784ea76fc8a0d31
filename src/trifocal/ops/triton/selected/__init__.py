"""Attention to the selected blocks: gathered and masked kernels, and the block CSR that they read."""
