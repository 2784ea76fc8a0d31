"""Without a GPU these tests run the kernels in Triton's interpreter; with one, on the GPU.

The interpreter is chosen when a kernel is defined, so before its module is imported.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
