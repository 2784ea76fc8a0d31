"""A kernel that never ends must not hold up all other tests, nor PyTorch's word of its own first use of a GPU."""

from pathlib import Path

import pytest

# Several times what the longest test takes with as many workers as there are cores.
MAX_SECONDS = 200
# Of long tests, which compile whole models.
LONG = {
    f"test_{name}.py" for name in ("doctor", "training", "traces", "telemetry", "model", "layer_types", "hf_packed")
}


def pytest_collection_modifyitems(items):
    """End the process of a test here that takes too long: no signal interrupts a wait for the GPU.

    With `-n` the test counts as failed, and another worker takes the rest. Long tests come first, so that no worker is
    left alone with them; `--maxschedchunk 1` hands them out one by one.
    """
    here = Path(__file__).parent
    items.sort(key=lambda item: item.path.parent != here or item.path.name not in LONG)
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.timeout(MAX_SECONDS, method="thread"))
            # Said once a process, by whichever test first has a product in autograd's own thread.
            item.add_marker(pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"))
