"""Without a GPU these tests run the kernels in Triton's interpreter, at twice its usual speed; with one, on the GPU.

There a kernel that never ends must not hold up all other tests, nor PyTorch's word of its own first use of a GPU.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

MOST_SECONDS_ON_A_GPU = 200
"""Several times what the longest test takes with as many workers as there are cores."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """End the process of a test that takes too long on a GPU: no signal interrupts a wait for it."""
    here = Path(__file__).parent
    for item in items if torch.cuda.is_available() else ():
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.timeout(MOST_SECONDS_ON_A_GPU, method="thread"))
            item.add_marker(pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"))


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="package", autouse=True)
def quick_interpreter() -> None:
    """Spares Triton's interpreter work whose result it throws away; the results of kernels are the same."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    # It computes every sum and product of integers again in 64 bits, for a check that is made in debug mode alone.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    # A kernel that is launched replaces Triton's language by NumPy's; each helper that it calls would do so once more.
    known: set[Callable[..., Any]] = set()

    def call_helper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn not in known:
            known.add(self.fn)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call_helper
