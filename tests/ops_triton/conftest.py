"""Without a GPU these tests run the kernels in Triton's interpreter, at twice its usual speed; with one, on the GPU."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch


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
