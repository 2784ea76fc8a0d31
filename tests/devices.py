"""The devices that tests run on: a CPU, and a GPU where there is one."""

import pytest
import torch

NEEDS_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))
QUIET_GPU = (*NEEDS_GPU, pytest.mark.filterwarnings("ignore"))
"""Where the compiler warns about its own calls, and the mode that finds waits about itself."""
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]
WIDE = {"dim": 256, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "value_dim": 64, "mlp_dim": 512}
"""A model of the widths that kernels are made for."""


def needs_gpu(test):
    """Mark a test for a GPU, or skip it here."""
    for mark in NEEDS_GPU:
        test = mark(test)
    return test
