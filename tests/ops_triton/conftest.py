"""Without a GPU these tests run the kernels in Triton's interpreter, made quick; with one, on the GPU.

There a kernel that never ends must not hold up all other tests, nor PyTorch's word of its own first use of a GPU.
"""

from pathlib import Path

import pytest
import torch

from tests.ops_triton.interpreter import make_quick

MAX_SECONDS_ON_A_GPU = 200
"""Several times what the longest test takes with as many workers as there are cores."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """End the process of a test that takes too long on a GPU: no signal interrupts a wait for it."""
    here = Path(__file__).parent
    for item in items if torch.cuda.is_available() else ():
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.timeout(MAX_SECONDS_ON_A_GPU, method="thread"))
            item.add_marker(pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"))


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="package", autouse=not torch.cuda.is_available())
def quick_interpreter() -> None:
    """The interpreter of these tests."""
    pytest.importorskip("triton.runtime.interpreter")
    make_quick()
