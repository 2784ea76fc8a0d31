"""Settings for all tests, made before Triton is imported: without a GPU, kernels run in Triton's interpreter."""

import gc
import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.devices import DEVICES

MAX_SECONDS_ON_A_GPU = 200
"""Several times what the longest test takes with as many workers as there are cores."""

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# The drawn examples are the same in each run, so that a commit alone makes a test fail.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")

# Under nohup, or in the background of a shell, signals are ignored, and so they would be by the runs that tests start.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(params=DEVICES)
def device(request):
    """Each test that takes it runs on a CPU, and on a GPU where there is one."""
    return torch.device(request.param)


def pytest_collection_modifyitems(items):
    """End the process of a test that takes too long on a GPU: no signal interrupts a wait for it.

    With `-n` the test counts as failed, and another worker takes the rest.
    """
    kernels = Path(__file__).with_name("ops_triton")
    for item in items if torch.cuda.is_available() else ():
        if item.get_closest_marker("gpu") or item.path.is_relative_to(kernels):
            item.add_marker(pytest.mark.timeout(MAX_SECONDS_ON_A_GPU, method="thread"))
            # Said once a process, by whichever test first has a product in autograd's own thread.
            item.add_marker(pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"))


def pytest_collection_finish():
    """The modules of all tests stay: the garbage collector need not look at them again and again.

    Nor often at what comes later, such as PyTorch's compiler: a look at all of it takes a third of a second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@pytest.fixture(autouse=torch.cuda.is_available())
def _memory_goes_back():
    """A GPU that several test processes share has none left for what their allocators keep."""
    yield
    if torch.cuda.is_initialized() and not _context_is_lost():
        torch.cuda.empty_cache()


def pytest_runtest_logfinish():
    """An illegal address fails every later test of its process too. So the process ends; xdist starts another."""
    if torch.cuda.is_initialized() and _context_is_lost():
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(1)
        pytest.exit("the GPU's context is lost: the tests after this one would fail as well", 1)


def _context_is_lost():
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


@pytest.fixture
def sleeper():
    """A process that only sleeps."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()
