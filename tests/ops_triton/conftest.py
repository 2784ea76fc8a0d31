"""Without a GPU these tests run the kernels in Triton's interpreter, made quick; with one, on the GPU."""

import pytest
import torch

from tests.ops_triton.interpreter import make_quick


@pytest.fixture
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="package", autouse=not torch.cuda.is_available())
def quick_interpreter():
    """The interpreter of these tests."""
    pytest.importorskip("triton.runtime.interpreter")
    make_quick()
