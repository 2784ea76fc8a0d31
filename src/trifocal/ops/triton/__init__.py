"""The portable Triton kernels. Importing this package imports no Triton; `ops.dispatch` says when they run."""
