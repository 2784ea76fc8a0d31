"""The kernels of a decoding step."""
